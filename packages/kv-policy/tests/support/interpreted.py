"""Triton's interpreter, which runs kernels where no GPU is, in half of its time.

For every function that a kernel calls, the interpreter looks through Triton's language and maps it
to its own, which it has done for the kernel. Here a module of Triton is looked through once, and
mapped once in a launch.
"""

import functools
import importlib.util
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch

from kv_policy.interpreter import SWITCH


def interpret_without_gpu() -> None:
    """Let the interpreter run kernels if torch finds no GPU, before triton is imported."""
    if torch.cuda.is_available():
        return
    os.environ[SWITCH] = "1"  # triton reads this at import
    if importlib.util.find_spec("triton"):
        map_once()


def map_once() -> None:
    """Map Triton's language once in each launch, not in each call of a function."""
    from triton.runtime import interpreter

    mapped: Callable[[Any], Any] = interpreter._patch_lang
    met: set[int] = set()  # the modules, by their names, whose functions this launch has called

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc]  # triton declares no types
        def restore(self) -> None:
            met.clear()
            super().restore()

    def once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in met:
            return Scope()
        met.add(module)
        return mapped(function)

    @functools.cache
    def builtins(package: Any) -> list[tuple[str, Any]]:
        return inspect.getmembers(package, interpreter.tl.core.is_builtin)

    def map_builtins(package: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins(package):
            interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._LangPatchScope = Scope
    interpreter._patch_lang, interpreter._patch_builtin = once, map_builtins
