"""Decode steps of an engine's requests: the host reads nothing that the device has."""

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from kv_paging import PagePool
from kv_policy import CacheShape, parse
from kv_runtime import Layout, PolicyCache, RequestBatch, RequestRows, RequestStep
from kv_runtime.copies import HostCopy, to_device
from unread import reading_raises

SHAPE = CacheShape(2, 1, 2, 16, 16, torch.float32)
PROMPTS, STEPS = (20, 17), 3


READS = "k8v4+quest:budget=16,sinks=0,recent=0,whole=1"


@pytest.mark.parametrize("text", ["kv-compress:rate=2,floor=8+k8v4", "leankv", "raw", READS])
def test_a_decode_step_and_the_count_of_its_pages(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = parse(text)
    nbytes = Layout.of(policy, SHAPE, None, 16, pooled=True).page_bytes
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
