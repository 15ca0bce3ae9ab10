"""Tokens that a step verifies attend as tokens that are decoded one by one, whatever is drafted."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_runtime import split_requests
from slot_engine import BLOCKS, SIZE, Engine, form

PROMPT = 5


def verify(engine: Engine, new: dict[int, int], split: list[bool]) -> dict[int, torch.Tensor]:
    """Let requests go on by some tokens, those of some as rows of one token; give what they see."""
    given = engine.given(new)
    start, length, table = split_requests(
        given.start, given.length, given.table, torch.tensor(split)
    )
    step = engine.blocks.step(start, length, int(given.length.max()), table, given.slots)
    out = torch.full_like(given.query, torch.nan)
    engine.layer.forward(given.query, given.key, given.value, engine.cache, step, out)
    return dict(zip(new, out.split([*new.values()]), strict=True))


def guess(engine: Engine, request: int, kept: int, count: int) -> None:
    """Let a request verify other tokens than its own after `kept`, and take those back."""
    at, held = engine.done[request], {}
    for name in ("query", "key", "value"):
        rows = getattr(engine, name)[request]
        held[name] = rows[at + kept : at + count].clone()
        rows[at + kept : at + count] = 50 * torch.randn_like(held[name])
    verify(engine, {request: count}, [True])
    for name, true in held.items():
        getattr(engine, name)[request][at + kept : at + count] = true
    engine.done[request] = at + kept


@pytest.mark.parametrize("name", ["fp32", "bf16", "k8v8", "k8v4", "k4v2"])
@given(lengths=st.lists(st.integers(6, 23), min_size=1, max_size=3), seed=st.integers(0, 2**16))
@settings(max_examples=10, deadline=None)
def test_verified_tokens_attend_as_decoded_ones_and_rejected_ones_leave_nothing(
    name: str, lengths: list[int], seed: int
) -> None:
    draw = random.Random(seed)
    alone, drafted = (Engine(form(name), lengths) for _ in range(2))
    expected: dict[int, list[torch.Tensor]] = {r: [] for r in range(len(lengths))}
    for engine in (alone, drafted):
        engine.step({r: PROMPT for r in expected})
    for request, length in enumerate(lengths):
        while alone.done[request] < length:
            expected[request].append(alone.step({request: 1})[request][0])
    while left := {r: n - drafted.done[r] for r, n in enumerate(lengths) if n > drafted.done[r]}:
        new = {r: draw.randint(1, n) for r, n in left.items()}
        if draw.random() < 0.5:
            request = draw.choice(list(new))
            guess(drafted, request, draw.randint(0, new[request]), new[request])
            continue
        first = {r: drafted.done[r] - PROMPT for r in new}
        for request, out in verify(drafted, new, [True] * len(new)).items():
            wanted = torch.cat(expected[request][first[request] :][: new[request]])
            torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    # A block that is full is equal byte for byte, so no byte of a token depends on another.
    full = [b for r, n in enumerate(lengths) for b in drafted.table[r, : n // SIZE].tolist()]
    assert all(block < BLOCKS for block in full)
    assert torch.equal(drafted.cache[full], alone.cache[full])


def test_unsplit_they_would_attend_to_drafts_as_they_are() -> None:
    alone, other = (Engine(form("k4v2"), [9]) for _ in range(2))
    for engine in (alone, other):
        engine.step({0: PROMPT})
    one_by_one = torch.cat([alone.step({0: 1})[0][0] for _ in range(4)])
    assert not torch.allclose(verify(other, {0: 4}, [False])[0], one_by_one, rtol=1e-2, atol=1e-2)


def test_only_requests_that_are_to_be_split_are() -> None:
    start, length = torch.tensor([0, 3, 3, 7, 8]), torch.tensor([9, 0, 20, 5])
    table = torch.arange(8).view(4, 2)
    split = torch.tensor([True, True, False, True])
    ends, lengths, rows = split_requests(start, length, table, split)
    assert ends.tolist() == [0, 1, 2, 3, 3, 7, 8]
    assert lengths.tolist() == [7, 8, 9, 0, 20, 5]
    assert rows[:, 0].tolist() == [0, 0, 0, 2, 4, 6]


def test_lengths_are_split_on_their_device() -> None:
    """Tensors on `meta` have no numbers, so reading one raises."""
    meta = torch.device("meta")
    length, table = torch.empty(2, device=meta).int(), torch.empty(2, 8, device=meta).int()
    start, split = torch.tensor([0, 4, 5]), torch.tensor([True, False])
    _, lengths, rows = split_requests(start, length, table, split)
    assert (lengths.shape, lengths.dtype, rows.shape) == ((5,), torch.int32, (5, 8))
