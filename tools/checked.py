"""Checks of types and shapes in tests, with jaxtyping's verdicts, compiled once for a definition.

jaxtyping's hook gives every function its decorator. That compiles its checks again whenever a
nested function is defined, binds the arguments of each call to a signature, and checks them before
the call and after it. `jaxtyped` here does each of these once.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from types import CodeType
from typing import Any, get_type_hints

import jaxtyping

Function = Callable[..., Any]
ORIGINAL = jaxtyping.jaxtyped
SCOPE = ORIGINAL("context")  # of the sizes that letters stand for, which end with a call
BEGIN, END = SCOPE.__enter__, SCOPE.__exit__  # as torch.compile enters no global in a `with`


def install() -> None:
    """Let jaxtyping's hook decorate with `jaxtyped`, in modules that are not imported yet."""
    jaxtyping.jaxtyped = jaxtyped


def jaxtyped(given: Any = None, *, typechecker: Function) -> Any:
    """Check the arguments and results of a function, or what initializes a dataclass."""
    again = functools.partial(jaxtyped, typechecker=typechecker)
    if given is None:
        return again
    if isinstance(given, type):
        if is_dataclass(given) and not hasattr(given.__init__, "_checked"):
            given.__init__ = again(given.__init__)
        return given
    if isinstance(given, classmethod | staticmethod):
        return type(given)(again(given.__func__))
    if isinstance(given, property):
        return property(*(each and again(each) for each in (given.fget, given.fset, given.fdel)))
    arguments, result = _checks(given, typechecker)

    @functools.wraps(given)
    def checked(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if jaxtyping.config.jaxtyping_disable:
            return given(*args, **kwargs)
        BEGIN()
        try:
            try:
                arguments(*args, **kwargs)
            except Exception:
                ORIGINAL(given, typechecker=typechecker)(*args, **kwargs)  # says what is wrong
                raise
            return result(given(*args, **kwargs))
        finally:
            END(None, None, None)

    checked._checked = True
    return checked


def _checks(
    function: Function,
    typechecker: Function,
    known: dict[int, tuple[CodeType, Function, Function]] = {},  # noqa: B006
) -> tuple[Function, Function]:
    """Return what takes the arguments of a function and checks them, and the same of its result.

    They are compiled once for a definition: mypy has seen that its annotations are always the same.
    """
    code = function.__code__  # kept, so that no other has its id; others may be equal to it
    if id(code) not in known:
        hints = {name: _resolved(hint, function) for name, hint in function.__annotations__.items()}
        returned = {"return": hints.pop("return")} if "return" in hints else {}
        bare = [_bare(each) for each in inspect.signature(function).parameters.values()]
        arguments = _stub(function, str(inspect.Signature(bare)), "None", hints)
        arguments.__defaults__ = function.__defaults__
        arguments.__kwdefaults__ = function.__kwdefaults__
        result = _stub(function, "(result)", "result", returned)
        known[id(code)] = (code, typechecker(arguments), typechecker(result))
    return known[id(code)][1:]


def _bare(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter as it can be written in code: without a type, with any default."""
    default = parameter.empty if parameter.default is parameter.empty else None
    return parameter.replace(annotation=parameter.empty, default=default)


def _stub(function: Function, parameters: str, value: str, hints: dict[str, Any]) -> Function:
    """Return a function of the same name, with these parameters, that returns a value."""
    made: dict[str, Any] = {}
    exec(f"def stub{parameters}: return {value}", made)
    stub = made["stub"]
    stub.__annotations__ = hints
    stub.__module__ = function.__module__
    stub.__name__, stub.__qualname__ = function.__name__, function.__qualname__
    return stub


def _resolved(hint: Any, function: Function) -> Any:
    """Return a hint without names in quotes; one that is unknown at run time is not checked."""

    def holder() -> None: ...

    holder.__annotations__ = {"hint": hint}
    try:
        return get_type_hints(holder, function.__globals__, include_extras=True)["hint"]
    except NameError:
        return Any
