"""Decode steps of an engine's requests: the host reads nothing that the device has."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kv_paging import PagePool
from kv_policy import CacheShape, parse
from kv_runtime import PolicyCache, RequestBatch, RequestRows, RequestStep
from kv_runtime.copies import HostCopy, to_device
from kv_runtime.token_rows import TokenRows
from launches import WAITS

SHAPE = CacheShape(2, 1, 2, 16, 16, torch.float32)
PROMPTS, STEPS = (20, 17), 3
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


@pytest.mark.parametrize("text", ["kv-compress:rate=2,floor=8+k8v4", "leankv", "raw"])
def test_a_decode_step_and_the_count_of_its_pages(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = parse(text)
    nbytes = PolicyCache(policy, SHAPE, backend="triton").layout.page_bytes
    pool = PagePool.over(torch.zeros(400, nbytes, dtype=torch.uint8), kernels="triton")
    empty = PolicyCache(policy, SHAPE, backend="triton", pool=pool, careful=True)
    batch = RequestBatch(empty, 0.3, MagicMock(side_effect=AssertionError))

    def run(counts: tuple[int, ...], done: tuple[int, ...]) -> Any:
        start = torch.tensor((0, *counts)).cumsum(0).tolist()
        steps = {
            i: RequestStep(str(i), done[i], counts[i], PROMPTS[i], serial=i)
            for i in range(len(PROMPTS))
        }
        rows = RequestRows(tuple(steps), tuple(start))
        query = torch.randn(start[-1], 2, 16)
        key = torch.randn(start[-1], 1, 16)
        batch.begin(steps, ())
        if counts == PROMPTS:
            return attend(rows, query, key)
        with reading_raises(monkeypatch):
            return attend(rows, query, key)

    def attend(rows: RequestRows, query: torch.Tensor, key: torch.Tensor) -> Any:
        for layer in range(SHAPE.layers):
            batch.attend(layer, rows, query, key, key, torch.empty_like(query))
        batch.end()
        return batch.counted(kept=True)

    run(PROMPTS, (0, 0))
    for step in range(STEPS):
        counted = run((1, 1), tuple(each + step for each in PROMPTS))
    found = counted.read()
    assert [found[str(i)].computed for i in range(2)] == [each + STEPS for each in PROMPTS]
    assert found == batch.held(kept=True)


def test_a_copy_to_a_gpu_is_pinned_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, copies = torch.arange(3), []

    def to(x: torch.Tensor, *given: object, **named: object) -> torch.Tensor:
        copies.append((x is pinned, named))
        return x

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: pinned)
    monkeypatch.setattr(torch.Tensor, "to", to)
    to_device(torch.arange(3), torch.device("cuda"))
    assert copies == [(True, {"non_blocking": True})]


def test_a_copy_from_a_gpu_is_waited_for_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    event, there = MagicMock(spec=torch.Event), torch.arange(3)
    monkeypatch.setattr(torch, "Event", lambda device: event)
    given = MagicMock(spec=torch.Tensor, is_cuda=True)
    given.to.return_value = there
    made = HostCopy(there, event)
    assert HostCopy.of(given) == made
    given.to.assert_called_once_with("cpu", non_blocking=True)
    event.record.assert_called_once_with()
    event.synchronize.assert_not_called()
    assert made.read() is there
    event.synchronize.assert_called_once_with()
