"""Reads by the host of what the device has, which raise."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kv_runtime.token_rows import TokenRows
from launches import WAITS

READS = {"tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__index__", "__float__"}


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert getattr(func, "__name__", "") not in READS, f"{func} reads"
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.__name__.split(".")[0] not in WAITS, f"{func} waits"
        return func(*args, **(kwargs or {}))


@contextmanager
def reading_raises(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let reads of any tensor raise, except of the rows of requests, which the host has."""
    from triton.runtime.interpreter import GridExecutor

    modes = (_Functions(), _Operations())

    def outside(run: Any) -> Any:
        def called(*given: Any, **named: Any) -> Any:
            for mode in reversed(modes):
                mode.__exit__(None, None, None)
            try:
                return run(*given, **named)
            finally:
                for mode in modes:
                    mode.__enter__()

        return called

    with monkeypatch.context() as patch, modes[0], modes[1]:
        patch.setattr(GridExecutor, "__call__", outside(GridExecutor.__call__))
        patch.setattr(TokenRows, "of", outside(TokenRows.of))
        yield
