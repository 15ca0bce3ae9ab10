"""Names that moved to kv_transformers still work, with a deprecation warning."""

import pytest

import kv_serve
import kv_transformers


@pytest.mark.parametrize("name", kv_serve.__all__)
def test_a_name_that_moved_works_and_says_where_it_went(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"`from kv_transformers import {name}`"):
        found = getattr(kv_serve, name)
    assert found is getattr(kv_transformers, name)


def test_another_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'kv_serve' has no attribute 'Cache'"):
        _ = kv_serve.Cache
