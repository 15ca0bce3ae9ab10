"""Methods are extended once by each module, also where several modules extend the same method."""

from collections.abc import Callable

from kv_serve.vllm.extending import extend


def named(module: str) -> Callable[..., list[str]]:
    def function(method: Callable[..., list[str]], self: object, *given: str) -> list[str]:
        return [module, *method(self, *given)]

    function.__module__ = module
    return function


def test_a_method_is_extended_once_by_each_module() -> None:
    class Owner:
        def said(self, *given: str) -> list[str]:
            return [*given]

    first, second = named("first"), named("second")
    for each in (first, first, second, first, second, second):
        extend(Owner, "said", each)
    assert Owner().said("a", "b") == ["second", "first", "a", "b"]


def test_a_class_that_inherits_an_extended_method_has_it_once() -> None:
    class Owner:
        def said(self) -> list[str]:
            return []

    class Inherits(Owner):
        pass

    for owner in (Owner, Inherits):
        extend(owner, "said", named("first"))
    assert Inherits().said() == ["first"]
