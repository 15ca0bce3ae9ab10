"""What the package itself offers; that importing it is light is a test of the workspace."""

import pytest

import kv_serve


def test_names_are_those_of_their_modules() -> None:
    from kv_serve.hf.cache import CompressedCache
    from kv_serve.hf.fold import Fold
    from kv_serve.hf.switch import uninstall

    found = {name: getattr(kv_serve, name) for name in kv_serve.__all__}
    assert found == {"CompressedCache": CompressedCache, "Fold": Fold, "uninstall": uninstall}


def test_another_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'kv_serve' has no attribute 'Cache'"):
        _ = kv_serve.Cache
