"""A cache as a keyword of a model's call, whatever its transformers calls it."""

from importlib.metadata import version
from inspect import signature
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from torch import nn

RENAMED: Final = (5, 24)  # the version of transformers that gave the argument another name
T = TypeVar("T")


def passing(model: "nn.Module", cache: T) -> dict[str, T]:
    """Give the cache by the name that the model takes it by, in a forward pass and in `generate`.

    That is `cache` since transformers 5.24, and `past_key_values` before. What hands on whatever it
    is given, such as a wrapper around a model, goes by the transformers that is installed.
    """
    taken = signature(model.forward).parameters
    major, minor, *_ = version("transformers").split(".")
    names = ("cache", "past_key_values")
    expected = names[0] if (int(major), int(minor)) >= RENAMED else names[1]
    return {next((name for name in names if name in taken), expected): cache}
