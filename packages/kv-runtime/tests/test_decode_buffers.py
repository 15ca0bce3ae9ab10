"""Decode steps over slots that are captured once: replayed, they compute any step's attention."""

import pytest
import torch

from kv_runtime import DecodeBuffers, SlotLayer, captures
from kv_runtime.slots import Blocks
from launches import Graph
from slot_engine import DIM, GROUP, HEADS, SCALE, SIZE, Engine, blocks, form

CPU = torch.device("cpu")
LENGTHS, LONGEST, MOST = (6, 14, 23, 9), 30, 4


class Captured:
    """A decode step of up to `MOST` requests through two layers, at fixed addresses."""

    def __init__(self, engine: Engine) -> None:
        self.layer = engine.layer
        self.buffers = DecodeBuffers.of(engine.blocks, MOST, LONGEST, CPU)
        self.caches = [engine.cache, engine.cache.clone()]
        self.q = torch.full((MOST, HEADS * GROUP, DIM), torch.nan)
        self.k, self.v = (torch.full((MOST, HEADS, DIM), torch.nan) for _ in range(2))
        self.out = [torch.full_like(self.q, torch.nan) for _ in self.caches]
        self.graph = Graph()
        nothing = torch.full((MOST,), -1), torch.zeros(MOST, 8, dtype=torch.int32)
        for graph in (Graph(), self.graph):  # once to warm up
            step = self.buffers.step(MOST, torch.ones(MOST).int(), LONGEST, nothing[1], nothing[0])
            with graph.capture():
                for cache, out in zip(self.caches, self.out, strict=True):
                    self.layer.forward(self.q, self.k, self.v, cache, step, out)

    def run(self, engine: Engine, requests: list[int]) -> list[torch.Tensor]:
        """Let requests go on by a token each; return what both layers compute."""
        given = engine.given(dict.fromkeys(requests, 1))
        count = len(requests)
        for held, new in ((self.q, given.query), (self.k, given.key), (self.v, given.value)):
            held.fill_(torch.nan)[:count] = new
        length = torch.cat((given.length, torch.full((MOST - count,), 99)))  # any, of padding
        table = torch.cat((given.table, given.table[:1].expand(MOST - count, -1)))
        longest = int(given.length.max())
        self.buffers.step(count, length.int(), longest, table, given.slots)
        for out in self.out:
            out.fill_(torch.nan)
        self.graph.replay()
        return self.out


def engine(name: str, backend: str = "triton", softmax: bool = False) -> Engine:
    """Return requests that have been prefilled up to their last four tokens."""
    sinks = torch.arange(6.0).view(HEADS, GROUP) / 5 if softmax else None
    made = Engine(form(name), LENGTHS, backend, 2.0 if softmax else None, sinks)
    for request, count in enumerate(LENGTHS):
        made.step({request: count - 4})
    return made


@pytest.mark.parametrize(
    ("name", "softmax"),
    [
        ("k8v4", False),
        ("bf16", True),
        pytest.param("k4v2", False, marks=pytest.mark.slow),
    ],
)
def test_a_captured_step_replayed_is_any_later_step(name: str, softmax: bool) -> None:
    """Of other lengths, blocks and slots, in another order, and of fewer requests."""
    own, eager = engine(name, softmax=softmax), engine(name, "torch", softmax=softmax)
    captured = Captured(own)
    for requests in ([2, 0, 3, 1], [1, 3], [3], [0, 2, 1]):
        found = captured.run(own, requests)
        wanted = torch.stack([x[0] for x, _ in eager.step(dict.fromkeys(requests, 1)).values()])
        for out, cache in zip(found, captured.caches, strict=True):
            real, padding = out.split([len(requests), MOST - len(requests)])
            torch.testing.assert_close(real, wanted, rtol=1e-4, atol=1e-4)
            assert not padding.any()
            assert torch.equal(cache[1:], eager.cache[1:])  # no request has block 0


def test_all_layers_of_a_captured_step_share_one_plan() -> None:
    names = Captured(engine("k8v4")).graph.names
    kernels = [name for name in names if name.endswith("_kernel")]
    layer = ["place_kernel", "decode_kernel", "combine_kernel"]
    assert kernels == [layer[0], "plan_kernel", *layer[1:], *layer]


def test_a_step_is_filled_without_reading_from_the_device() -> None:
    """Tensors on `meta` have no numbers, so reading one raises."""
    meta = torch.device("meta")
    own = blocks(form("k8v4"), "triton")
    step = DecodeBuffers.of(own, 3, LONGEST, meta).step(
        2,
        torch.empty(3, device=meta).int(),
        17,
        torch.empty(3, 9, device=meta).int(),
        torch.empty(3, device=meta).long(),
    )
    (batch,) = step.batches
    assert batch.table.shape == (3, HEADS, -(-LONGEST // SIZE))
    assert batch.longest == LONGEST


@pytest.mark.parametrize(("requests", "longest"), [(5, 3), (4, 31)])
def test_a_step_without_memory_for_it_raises(requests: int, longest: int) -> None:
    buffers = DecodeBuffers.of(blocks(form("k8v4"), "triton"), MOST, LONGEST, CPU)
    length = torch.ones(requests).int()
    with pytest.raises(ValueError, match=r"its memory is for 4 of up to 30"):
        buffers.step(requests, length, longest, length[:, None], length.long())


@pytest.mark.parametrize(
    ("name", "backend", "dtype", "wanted"),
    [
        ("k8v4", "triton", torch.bfloat16, True),
        ("bf16", "triton", torch.float32, True),
        ("k8v4", "torch", torch.bfloat16, False),
        ("k8v4", "triton", torch.float64, False),  # which torch computes
    ],
)
def test_steps_are_captured_if_kernels_for_gpus_compute_them(
    name: str, backend: str, dtype: torch.dtype, wanted: bool
) -> None:
    own: Blocks = blocks(form(name), backend)
    layer = SlotLayer(form(name), SCALE, backend)
    assert captures(layer, own, HEADS * GROUP, dtype, CPU) is wanted
