import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_evict.pooling import _greatest, pool


@st.composite
def heads(draw: st.DrawFn):
    """Tokens of a head: positions with gaps, scores of either sign, and which of them count."""
    positions = sorted(draw(st.sets(st.integers(0, 30), min_size=1, max_size=20)))
    many = {"min_size": len(positions), "max_size": len(positions)}
    scores = draw(st.lists(st.floats(-4, 4), **many))
    return positions, scores, draw(st.lists(st.booleans(), **many))


@given(
    st.lists(heads(), min_size=1, max_size=3),
    st.sampled_from([1, 3, 7, 61]),
    st.sampled_from(["avg", "max", "max on a device"]),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_pooling_is_that_of_plain_loops(rows, size, how):
    places = max(len(positions) for positions, _, _ in rows) + 1
    position = torch.full((1, len(rows), places), -1)
    score = torch.full((1, len(rows), places), torch.nan, dtype=torch.float64)
    counts = torch.zeros(1, len(rows), places, dtype=torch.bool)
    for h, (positions, scores, counted) in enumerate(rows):
        position[0, h, : len(positions)] = torch.tensor(positions)
        score[0, h, : len(positions)] = torch.tensor(scores, dtype=torch.float64)
        counts[0, h, : len(positions)] = torch.tensor(counted)
    highest = how != "avg"
    if how == "max on a device":
        found = _greatest(score.masked_fill(~counts, 0), position, counts, size // 2)
    else:
        found = pool(score, position, counts, size, how)
    for h, row in enumerate(rows):
        for i, (p, _, counted) in enumerate(zip(*row, strict=True)):
            expected = 0.0
            if counted:
                around = [s for q, s, c in zip(*row, strict=True) if c and abs(p - q) <= size // 2]
                expected = max(around) if highest else sum(around) / len(around)
            assert found[0, h, i].item() == pytest.approx(expected, abs=1e-12)
        assert not found[0, h, len(row[0]) :].any()


def test_what_lies_across_a_gap_is_no_neighbour():
    position = torch.tensor([[[0, 1, 3, 50, 52]]])
    score = torch.tensor([[[1.0, 2, 4, 8, 16]]])
    pooled = pool(score, position, position >= 0, 3, "avg")
    assert pooled[0, 0].tolist() == [1.5, 1.5, 4, 8, 16]


def test_a_single_token():
    one = torch.tensor([[[3]]])
    assert pool(one.float(), one, one > 0, 21, "avg").tolist() == [[[3.0]]]


@given(heads(), st.sampled_from([3, 7, 21]))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_tokens_of_the_same_pool_are_worth_the_same_to_the_last_bit(row, size):
    # A plan then breaks ties by position, in a batch as alone.
    positions, scores, counted = row
    position, counts = torch.tensor([[positions]]), torch.tensor([[counted]])
    found = pool(torch.tensor([[scores]]).float() / 3, position, counts, size, "avg")[0, 0]
    pools = {}
    for i, p in enumerate(positions):
        if counted[i]:
            near = (abs(p - q) <= size // 2 for q in positions)
            mine = tuple(j for j, n in enumerate(near) if n and counted[j])
            pools.setdefault(mine, set()).add(found[i].item())
    assert all(len(values) == 1 for values in pools.values())
