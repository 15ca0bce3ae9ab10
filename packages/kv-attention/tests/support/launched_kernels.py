"""The kernels that are launched, without launching them, and operations of torch."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def launched() -> Iterator[list[tuple[str, torch.device | None]]]:
    """Note the kernels that are launched, and the device at that time; launch none."""
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.jit import JITFunction

    current: list[torch.device] = []
    found: list[tuple[str, torch.device | None]] = []

    @contextmanager
    def launching_on(x: torch.Tensor) -> Iterator[None]:
        current.append(x.device)
        yield
        current.pop()

    def run(kernel: Any, *given: object, **named: object) -> None:
        found.append((kernel.fn.__name__, current[-1] if current else None))

    with ExitStack() as stack:
        for module in ("decode", "prefill", "attention_mass", "selecting"):
            stack.enter_context(patch(f"kv_attention.gpu.{module}.launching_on", launching_on))
        stack.enter_context(patch.object(GridExecutor, "__call__", run))
        stack.enter_context(patch.object(JITFunction, "run", run))
        yield found


class Operations(TorchDispatchMode):
    """Counts operations of torch, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))
