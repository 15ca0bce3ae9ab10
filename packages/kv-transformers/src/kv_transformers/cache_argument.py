"""The keyword argument for a cache, whose name depends on the version of transformers."""

from functools import cache as cached
from importlib.metadata import version
from inspect import signature
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from torch import nn

RENAMED: Final = (5, 24)  # the version of transformers that renamed the argument
T = TypeVar("T")


def passing(model: "nn.Module", cache: T) -> dict[str, T]:
    """Return the cache as a keyword argument for the model's forward pass and `generate`.

    The name is `cache` since transformers 5.24, and `past_key_values` before. For a wrapper that
    forwards any arguments, the installed transformers determines the name.
    """
    taken = signature(model.forward).parameters
    return {next((name for name in _names() if name in taken), _names()[0]): cache}


@cached
def _names() -> tuple[str, str]:
    """Return both names, the one of the installed transformers first; reading a version is slow."""
    major, minor, *_ = version("transformers").split(".")
    new, old = "cache", "past_key_values"
    return (new, old) if (int(major), int(minor)) >= RENAMED else (old, new)
