"""A cache as a keyword of a model's call, whatever its transformers calls it."""

from inspect import signature
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")


def passing(model: "nn.Module", cache: T) -> dict[str, T]:
    """Give the cache by the name that the model takes it by, in a forward pass and in `generate`.

    That is `cache` since transformers 5.24, and `past_key_values` before.
    """
    before = "past_key_values"
    return {before if before in signature(model.forward).parameters else "cache": cache}
