from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import beartype
import jaxtyping
import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tools import checked

DECORATORS = (checked.ORIGINAL, checked.jaxtyped)


def _same(x: Float[Tensor, "B L"], y: Float[Tensor, "B L"], *, n: int = 2) -> Float[Tensor, "L B"]:
    return x.T if n else y


def _later(x: "Tensor", *rest: int, **more: "Unknown") -> "int | None":  # noqa: F821
    return rest[0] if rest else None


def _body(x: Float[Tensor, "B L"], y: Tensor) -> None:
    assert isinstance(y, Float[Tensor, "L B"])


def _numbers(n: int) -> Iterator[int]:
    yield from range(n)


X, Y = torch.zeros(2, 3), torch.zeros(3, 2)
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
TAKEN: list[Call] = [
    (_same, (X, X), {}),
    (_later, (X, 1, 2), {"any": "thing"}),
    (_later, (X,), {}),
    (_body, (X, Y), {}),
    (_numbers, (3,), {}),
]
REFUSED: list[Call] = [
    (_same, (X,), {"y": X, "n": 0}),  # for its result, which is not transposed
    (_same, (X, Y), {}),
    (_same, (X, X), {"n": "2"}),
    (_same, (X, X, 2), {}),
    (_same, (X,), {}),
    (_same, (X.long(), X.long()), {}),
    (_later, (X, 1, "2"), {}),
    (_later, (3,), {}),
    (_body, (X, X), {}),
    (_numbers, ("3",), {}),
]


def _refused(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    try:
        function(*args, **kwargs)
    except (TypeError, AssertionError, jaxtyping.TypeCheckError, beartype.roar.BeartypeException):
        return True
    return False


@pytest.mark.parametrize("decorator", DECORATORS)
def test_what_jaxtyping_refuses_is_refused(decorator: Callable[..., Any]) -> None:
    for wanted, calls in ((False, TAKEN), (True, REFUSED)):
        for function, args, kwargs in calls:
            found = _refused(decorator(function, typechecker=beartype.beartype), *args, **kwargs)
            assert found is wanted, (function, args, kwargs)


def test_a_size_holds_for_one_call_and_not_for_those_inside_it() -> None:
    @checked.jaxtyped(typechecker=beartype.beartype)
    def outer(x: Float[Tensor, "B L"]) -> Float[Tensor, "B L"]:
        inner(x.T)
        return x

    @checked.jaxtyped(typechecker=beartype.beartype)
    def inner(x: Float[Tensor, "B L"]) -> None:
        assert not isinstance(x.T, Float[Tensor, "B L"])

    outer(X)
    outer(Y)


@pytest.mark.parametrize("decorator", DECORATORS)
def test_dataclasses_methods_and_properties_are_checked(decorator: Callable[..., Any]) -> None:
    check = decorator(typechecker=beartype.beartype)

    @check
    @dataclass(frozen=True)
    class Base:
        x: Float[Tensor, "B L"]
        y: Float[Tensor, "B L"]

        @property
        @check
        def turned(self) -> Float[Tensor, "B L"]:
            return self.x.T if len(self.x) == 3 else self.x[0]

        @classmethod
        @check
        def of(cls, x: Tensor) -> "int":
            return cls(x, x)

        @staticmethod
        @check
        def twice(n: int) -> int:
            return 2 * n

    @check
    @dataclass(frozen=True)
    class More(Base):
        z: int = 0

    assert not _refused(Base, X, X)
    assert _refused(Base, X, Y)
    assert not _refused(More, X, X)
    assert _refused(More, X, X, "0")
    assert _refused(lambda: Base(X, X).turned)
    assert not _refused(lambda: Base(Y, Y).turned)
    assert _refused(Base.of, X)
    assert (Base.twice(2), _refused(Base.twice, "a")) == (4, True)


def test_a_nested_function_is_compiled_once_and_checked_whenever_it_is_defined() -> None:
    compiled = []

    def typechecker(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled.append(function)
        return beartype.beartype(function)

    def outer(number: int) -> Callable[..., int]:
        @checked.jaxtyped(typechecker=typechecker)
        def inner(x: Int[Tensor, " B"], *, n: int = number) -> int:
            return number + n + len(x)

        return inner

    first, second = outer(1), outer(10)
    assert len(compiled) == 2  # of the arguments, and of the result
    assert (first(torch.arange(3)), second(torch.arange(3), n=0)) == (5, 13)
    assert _refused(first, X)
    assert _refused(second, torch.arange(3), n=0.5)


def test_functions_alike_with_other_types_are_told_apart() -> None:
    made = []
    for kind in (int, str):  # equal code, as that of dataclasses is
        code: dict[str, Any] = {"kind": kind}
        exec("def alike(x: kind): return x", code)
        made.append(checked.jaxtyped(code["alike"], typechecker=beartype.beartype))
    assert [_refused(each, 3) for each in made] == [False, True]
    assert [_refused(each, "3") for each in made] == [True, False]


def test_a_wrong_argument_is_named_with_the_sizes_of_the_others() -> None:
    with pytest.raises(jaxtyping.TypeCheckError, match=r"parameter 'y'(.|\n)*B=2\nL=3"):
        checked.jaxtyped(_same, typechecker=beartype.beartype)(X, Y)


def test_checks_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    assert checked.jaxtyped(_same, typechecker=beartype.beartype)(X, Y).shape == (3, 2)


def test_the_hook_of_this_run_takes_it() -> None:
    assert jaxtyping.jaxtyped is checked.jaxtyped
