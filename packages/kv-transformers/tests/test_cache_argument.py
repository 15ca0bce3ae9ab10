"""A cache is passed by the argument name of the installed transformers."""

from collections.abc import Iterator

import pytest
from torch import Tensor, nn
from transformers import DynamicCache

from kv_transformers import cache_argument
from kv_transformers.cache_argument import passing


class Before(nn.Module):
    """A model of transformers before 5.24."""

    def forward(self, input_ids: Tensor, past_key_values: DynamicCache | None = None) -> Tensor:
        return input_ids


class Since(nn.Module):
    """A model of transformers since 5.24."""

    def forward(self, input_ids: Tensor, cache: DynamicCache | None = None) -> Tensor:
        return input_ids


class Around(nn.Module):
    """A wrapper that forwards all arguments."""

    def forward(self, *given: object, **named: object) -> None:
        return None


def test_a_model_says_how_it_takes_its_cache() -> None:
    cache = DynamicCache()
    assert passing(Before(), cache) == {"past_key_values": cache}
    assert passing(Since(), cache) == {"cache": cache}
    assert passing(Since(), None) == {"cache": None}


@pytest.fixture
def unread() -> Iterator[None]:
    """Let the version be read anew, here and after this test."""
    cache_argument._names.cache_clear()
    yield
    cache_argument._names.cache_clear()


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("installed", "name"),
    [("5.16.1", "past_key_values"), ("5.24.0", "cache"), ("5.30.0.dev0", "cache")],
)
def test_a_wrapper_goes_by_the_version_that_is_installed(
    installed: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transformers.cache_argument.version", lambda _: installed)
    assert passing(Around(), None) == {name: None}


def test_the_version_is_read_once(unread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def version(name: str) -> str:
        asked.append(name)
        return "5.24.0"

    monkeypatch.setattr("kv_transformers.cache_argument.version", version)
    for _ in range(3):
        assert passing(Since(), None) == {"cache": None}
    assert asked == ["transformers"]
