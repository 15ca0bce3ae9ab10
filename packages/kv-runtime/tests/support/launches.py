"""A CUDA graph without CUDA: launches, recorded once and repeated with the same arguments.

Kernels run in Triton's interpreter. As in a graph, what Python computes is computed once: grids,
numbers, and where tensors are. A read of a tensor's numbers raises while launches are recorded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS: Final = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2"}


class Graph:
    """What has been launched; `replay` launches it again."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._launches: list[Callable[[], None]] = []

    def add(self, name: str, launch: Callable[[], None]) -> None:
        """Note a launch."""
        self.names.append(name)
        self._launches.append(launch)

    def replay(self) -> None:
        """Launch all again, in order."""
        with torch.inference_mode():
            for launch in self._launches:
                launch()

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Record what is launched."""
        from triton.runtime.interpreter import GridExecutor

        run, mode = GridExecutor.__call__, _Operations(self)

        def launched(kernel: GridExecutor, *given: Any, **named: Any) -> None:
            self.add(kernel.fn.__name__, lambda: run(kernel, *given, **named))
            mode.__exit__(None, None, None)  # what the interpreter does is no launch
            try:
                run(kernel, *given, **named)
            finally:
                mode.__enter__()

        with patch.object(GridExecutor, "__call__", launched), mode:
            yield


class _Operations(TorchDispatchMode):
    """Records operations of torch, with their results, which are at the same place in a replay."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, named = func.__name__.split(".")[0], kwargs or {}
        if name in WAITS:
            raise AssertionError(f"{name} makes the host wait, in what is captured")
        result = func(*args, **named)

        def again() -> None:
            every = tree_leaves(func(*args, **named))
            for held, new in zip(tree_leaves(result), every, strict=True):
                if isinstance(held, torch.Tensor) and held.data_ptr() != new.data_ptr():
                    held.copy_(new)

        self.graph.add(name, again)
        return result
