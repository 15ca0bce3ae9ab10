"""What Triton compiles kernels for: the key under which a compiled kernel is found again.

It is computed for an NVIDIA GPU of compute capability 9.0 without one. Nothing is launched.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

Keys = Mapping[str, set[str]]


@contextmanager
def compiled_keys() -> Iterator[Keys]:
    """Collect, by kernel, what it would be compiled for; launch nothing."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    found: defaultdict[str, set[str]] = defaultdict(set)

    def note(kernel: Any, *given: Any, grid: object, warmup: bool, **named: Any) -> None:
        found[kernel.fn.__name__].add(key_of(kernel, given, named))

    with patch.object(InterpretedFunction, "run", note), patch.object(JITFunction, "run", note):
        yield found


def key_of(kernel: Any, given: tuple[Any, ...], named: dict[str, Any]) -> str:
    """Return the key of a launch."""
    from triton.runtime.jit import compute_cache_key

    _, special, options = _binder(kernel)(*given, debug=False, **named)
    return str(compute_cache_key({}, special, options))


@cache
def _binder(kernel: Any) -> Callable[..., tuple[Any, Any, Any]]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    # In the interpreter, a kernel only has the arguments of its decorator.
    compiled = (
        kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
    )
    backend = make_backend(GPUTarget("cuda", 90, 32))
    made: Callable[..., tuple[Any, Any, Any]] = create_function_from_signature(
        compiled.signature, compiled.params, backend
    )
    return made


def misaligned(x: torch.Tensor) -> torch.Tensor:
    """Return a copy whose address is only a multiple of its element, as that of a slice."""
    room = x.new_empty(x.numel() + 1)
    return room[1:].view(x.shape).copy_(x)
