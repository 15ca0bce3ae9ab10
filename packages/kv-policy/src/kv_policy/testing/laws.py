"""Saying that a law is broken."""

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
    """Give what the call returns, and turn an error into an AssertionError."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        raise AssertionError(f"{sentence}: {type(error).__name__}: {error}") from error


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same in shape, dtype and every element, NaN like NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    same = a == b
    if a.is_floating_point():
        same |= a.isnan() & b.isnan()
    return bool(same.all())
