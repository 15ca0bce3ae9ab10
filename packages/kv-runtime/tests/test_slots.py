"""Steps of an engine, without the engine: what is stored where, and what each token sees."""

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kv_attention import Attended, RowInputs
from kv_policy import CacheShape, HeadBasis, LayerBasis, parse, tier_formats
from kv_runtime.bases import row_maps
from kv_runtime.output_rows import write_rows
from kv_runtime.slots import ALIGNED, LOSS, Blocks, SlotLayer, fit_block
from native import need
from slot_engine import BLOCKS, DIM, GROUP, HEADS, SCALE, SIZE, Engine, blocks, form, stored


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", ["fp32", "bf16", "k8v8", "k8v4", "k4v2"])
@given(
    lengths=st.lists(st.integers(1, 23), min_size=1, max_size=5),
    seed=st.integers(0, 2**16),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.sampled_from([None, 1.5]),
    unused=st.sampled_from((0, 16, 48)),
)
@settings(max_examples=10, deadline=None)
def test_a_token_sees_earlier_steps_as_stored_and_its_own_as_it_is(
    name: str,
    backend: str,
    lengths: list[int],
    seed: int,
    softcap: float | None,
    sinks: float | None,
    unused: int,
) -> None:
    need(backend)
    near = {"torch": 1e-4, "cpu": 1e-3}[backend]  # kernels may round weights to integers
    tier_thresholds = random.Random(seed)
    by_head = None if sinks is None else sinks + torch.arange(6.0).view(HEADS, GROUP) / 5
    engine = Engine(form(name), lengths, backend, softcap, by_head, unused)
    while any(done < n for done, n in zip(engine.done, lengths, strict=True)):
        left = {r: n - engine.done[r] for r, n in enumerate(lengths) if n > engine.done[r]}
        chosen = tier_thresholds.sample(sorted(left), tier_thresholds.randint(1, len(left)))
        new = {r: tier_thresholds.choice((1, tier_thresholds.randint(1, left[r]))) for r in chosen}
        for out, expected in engine.step(new, padding=tier_thresholds.randint(0, 2)).values():
            torch.testing.assert_close(out.double(), expected, rtol=near, atol=near)


def maps(kind: str) -> LayerBasis:
    """Rotations of each head, or one of all, and pairs of maps after a shift."""
    draw = torch.Generator().manual_seed(1)
    key, value = torch.linalg.qr(torch.randn(2, HEADS, DIM, DIM, generator=draw)).Q
    rank = (DIM,) * HEADS
    if kind == "one matrix":
        key, value = (x[:1].expand(HEADS, -1, -1) for x in (key, value))
    if kind != "shifted pair":
        return LayerBasis(HeadBasis(key, rank), HeadBasis(value, rank))
    stretch = torch.rand(HEADS, 1, DIM, generator=draw) + 0.5
    shift = 4 * torch.randn(HEADS, DIM, generator=draw)
    return LayerBasis(HeadBasis(key * stretch, rank, key / stretch, shift=shift), None)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("kind", ["rotations", "one matrix", "shifted pair"])
@pytest.mark.parametrize("name", ["fp32", "k8v8"])
def test_under_a_basis_tokens_are_stored_and_seen_as_coordinates(
    name: str, kind: str, backend: str
) -> None:
    need(backend)
    near = {"torch": 1e-4, "cpu": 1e-3}[backend]
    engine = Engine(form(name), [17, 6], backend, basis=maps(kind))
    for new in ({0: 9}, {0: 1, 1: 4}, {0: 1, 1: 1}, {1: 1, 0: 5}):
        for out, expected in engine.step(new, padding=1).values():
            torch.testing.assert_close(out.double(), expected, rtol=near, atol=near)


@pytest.mark.parametrize("kind", ["rotations", "one matrix", "shifted pair"])
def test_under_a_basis_a_decode_step_is_one_call(kind: str) -> None:
    need("cpu")
    ours, other = (Engine(form("fp32"), [17, 6], "cpu", basis=maps(kind)) for _ in range(2))
    decode, taken = ours.blocks.decode, []
    assert decode is not None

    def counted(inputs: RowInputs) -> Attended | None:
        taken.append(decode(inputs))
        return taken[-1]

    ours.blocks, other.blocks = (replace(ours.blocks, decode=x) for x in (counted, None))
    for new in ({0: 9, 1: 2}, {0: 1, 1: 1}, {1: 1}):
        found, wanted = (engine.step(new, padding=1) for engine in (ours, other))
        for request, (out, _) in found.items():
            torch.testing.assert_close(out, wanted[request][0], rtol=1e-4, atol=1e-4)
    assert len(taken) == 2  # of the steps that decode alone
    assert None not in taken
    stored_tokens = [engine.cache[1:].contiguous().view(torch.float32) for engine in (ours, other)]
    torch.testing.assert_close(*stored_tokens, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_heads_that_are_stored_together_have_no_maps_of_rows() -> None:
    rank = (DIM,) * (HEADS // 2)
    together = HeadBasis(torch.randn(HEADS, DIM, DIM), rank, together=2)
    with pytest.raises(ValueError, match="2 KV heads are stored together; rows are mapped for"):
        row_maps(LayerBasis(together, together))
    layer = SlotLayer(form("k8v8"), SCALE, "torch", basis=LayerBasis(together, together))
    assert layer.maps is None


@pytest.mark.parametrize(
    ("more", "what"), [((3.0, None), "a soft cap"), ((None, torch.zeros(2, 3)), "attention sinks")]
)
def test_a_shift_that_changes_attention_is_refused(
    more: tuple[float | None, Tensor | None], what: str
) -> None:
    SlotLayer(form("k8v8"), SCALE, "torch", *more, maps("rotations"))
    with pytest.raises(ValueError, match=f"changes the attention of layers with {what}"):
        SlotLayer(form("k8v8"), SCALE, "torch", *more, maps("shifted pair"))


def test_what_is_stored_does_not_depend_on_the_steps() -> None:
    whole, cut = (Engine(form("k8v4"), [17, 9]) for _ in range(2))
    whole.step({0: 17, 1: 9})
    for new in ({0: 5}, {1: 3, 0: 1}, {0: 11, 1: 1}, {1: 5}):
        cut.step(new)
    assert torch.equal(whole.cache, cut.cache)


def test_a_layer_reads_what_another_has_stored_and_stores_nothing() -> None:
    engine = Engine(form("k8v4"), [9])
    engine.step({0: 5})
    q, k, v = (x[0][5:9] for x in (engine.query, engine.key, engine.value))
    slots = torch.stack(
        [engine.table[0][at // SIZE].long() * SIZE + at % SIZE for at in range(5, 9)]
    )
    step = engine.blocks.step(torch.tensor([0, 4]), torch.tensor([9]), 9, engine.table, slots)
    out, again = torch.full_like(q, torch.nan), torch.full_like(q, torch.nan)
    engine.layer.forward(q, k, v, engine.cache, step, out, more=True)
    before = engine.cache.clone()
    engine.layer.forward(q, k, v, engine.cache, step, again, stored=True)
    assert torch.equal(again, out)
    other = torch.full_like(q, torch.nan)
    engine.layer.forward(q, 2 * k, v, engine.cache, step, other, stored=True)
    assert not torch.equal(other, out)
    assert torch.equal(engine.cache, before)


def test_a_latent_is_stored_once_and_its_value_is_a_part_of_it() -> None:
    dim, rank, group, count = 12, 8, 3, 9
    shape = CacheShape(1, 1, group, dim, rank, torch.float32, value_in_key=True)
    (latent,) = tier_formats(parse("k8v4"), shape)
    own = Blocks.of(latent, 1, SIZE, SIZE * latent.nbytes, torch.device("cpu"), "torch")
    cache = torch.full((BLOCKS, 1, SIZE, latent.nbytes), 255, dtype=torch.uint8)
    table, at = torch.tensor([[4, 2, 7, 5, 3, 1, 6]], dtype=torch.int32), torch.arange(count)
    slots = table[0][at // SIZE].long() * SIZE + at % SIZE
    key, query = 3 * torch.randn(count, 1, dim), torch.randn(1, group, dim)
    before = own.step(torch.tensor([0, 8]), torch.tensor([8]), 8, table, slots[:8])
    layer, out = SlotLayer(latent, SCALE, "torch"), torch.full((8, group, rank), torch.nan)
    everything = query.expand(8, -1, -1), key[:8], key[:8, :, :rank]
    layer.forward(*everything, cache, before, out)
    now = own.step(torch.tensor([0, 1]), torch.tensor([count]), count, table, slots[8:])
    out = torch.full((1, group, rank), torch.nan)
    layer.forward(query, key[8:], key[8:, :, :rank], cache, now, out)
    seen = torch.cat([stored(latent.key, key[:8]), key[8:].double()])[:, 0]
    weights = (query[0].double() @ seen.T * SCALE).softmax(-1)
    torch.testing.assert_close(out[0].double(), weights @ seen[:, :rank], rtol=1e-4, atol=1e-5)
    held = own.keys(cache, table[0]).flatten(0, 2)[:count, :].double()
    torch.testing.assert_close(held, stored(latent.key, key)[:, 0], rtol=1e-4, atol=1e-5)


def test_padding_writes_only_to_the_block_that_nobody_has() -> None:
    engine = Engine(form("k8v4"), [3])
    engine.step({0: 3}, padding=2)
    used = {0, int(engine.table[0, 0])}
    untouched = [b for b in range(BLOCKS) if b not in used]
    assert bool((engine.cache[untouched] == 255).all())


def test_requests_with_alike_many_new_tokens_attend_together() -> None:
    lengths = [1, 1, 1, 3, 4, 9]
    counts = torch.tensor([0, *lengths])
    table = torch.arange(1, 19).view(6, 3)
    step = blocks(form("k8v4")).step(
        counts.cumsum(0), torch.tensor(lengths), 9, table, torch.arange(int(counts.sum()))
    )
    shapes = [tuple(batch.position.shape) for batch in step.batches]
    assert shapes == [(3, 1), (2, 4), (1, 9)]


@pytest.mark.parametrize("new", [(1, 1, 1), (1, 7, 1), (5, 5, 5), (3, 4, 1), (1, 0, 1)], ids=str)
def test_a_step_reads_nothing_from_the_device(new: tuple[int, ...]) -> None:
    """Tensors on `meta` have no numbers, so reading one raises."""
    meta, count = torch.device("meta"), sum(new)
    start = torch.tensor([0, *new]).cumsum(0)  # which the host knows
    length, slot = torch.empty(3, device=meta).long(), torch.empty(count, device=meta).long()
    table = torch.empty(3, 8, device=meta).int()
    step = blocks(form("k8v4")).step(start, length, 30, table, slot)
    x = torch.empty(count, HEADS * GROUP, DIM, device=meta)
    for batch in step.batches:
        requests, width = batch.position.shape
        assert batch.take(x).shape == (requests, width, HEADS * GROUP, DIM)
        assert isinstance(batch.source, slice) or len(set(new)) > 1
        found = torch.empty(requests, HEADS, GROUP, width, DIM, device=meta)
        write_rows(found, x, batch.target, batch.place)


@given(
    tokens=st.sampled_from((1, 16, 32, 48)),
    stored=st.integers(1, 300),
    other=st.integers(1, 600),
    heads=st.integers(1, 4),
)
@settings(max_examples=50, deadline=None)
def test_blocks_of_equal_bytes_waste_little_where_that_is_possible(
    tokens: int, stored: int, other: int, heads: int
) -> None:
    token_bytes, nbytes = stored * heads, tokens * other

    def loss(count: int) -> float:
        return max(nbytes, count * token_bytes) / min(nbytes, count * token_bytes) - 1

    count, found = fit_block(tokens, token_bytes, nbytes, heads)
    assert found == max(nbytes, count * token_bytes)
    assert found == count * token_bytes or found % (heads * ALIGNED) == 0
    over = -(-nbytes // token_bytes)  # always possible: the other blocks are padded
    assert loss(count) <= max(loss(over), LOSS)
    if loss(over) <= LOSS:
        assert math.lcm(count, tokens) <= math.lcm(over, tokens)


@pytest.mark.parametrize(
    ("tokens", "stored", "other", "found"),
    [
        (128, 104, 256, (320, 33280)),  # the other blocks are padded
        (128, 200, 512, (320, 65536)),  # this layer's are
        (128, 256, 256, (128, 32768)),
        (32, 392, 1024, (84, 32928)),
    ],
)
def test_blocks_beside_windows_of_usual_sizes(
    tokens: int, stored: int, other: int, found: tuple[int, int]
) -> None:
    assert fit_block(tokens, stored, tokens * other, 1) == found
