"""Assertions for the laws of the contract."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


def law(holds: bool, sentence: str) -> None:
    """Raise AssertionError with the sentence unless the law holds, also under `python -O`."""
    if not holds:
        raise AssertionError(sentence)


def works(sentence: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the call's result, and turn an exception into an AssertionError."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        raise AssertionError(f"{sentence}: {type(error).__name__}: {error}") from error


def equal(a: Tensor, b: Tensor) -> bool:
    """Return whether shape, dtype and every element are equal, with NaN equal to NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    same = a == b
    if a.is_floating_point():
        same |= a.isnan() & b.isnan()
    return bool(same.all())
