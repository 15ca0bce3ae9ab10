"""Extend methods of vLLM's classes where vLLM has no hook."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any


def extend(owner: type | ModuleType, name: str, function: Callable[..., Any]) -> None:
    """Let a function be called in place of a method; may be called repeatedly.

    Args:
        owner: the class, or the module of a function.
        name: of the method.
        function: takes the method and then its arguments. Of each module, at most one extends it.
    """
    method = found = getattr(owner, name)
    while found is not None:  # through the extensions of others
        if found.__module__ == function.__module__:
            return
        found = getattr(found, "__wrapped__", None)

    @functools.wraps(method)
    def extended(*given: Any, **options: Any) -> Any:
        return function(method, *given, **options)

    extended.__module__ = function.__module__
    setattr(owner, name, extended)
