"""Heads of several ranks, compared with the same heads one by one, and with padded ones."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from kv_attention import DenseTokens, HeadGroup, attend, attend_ragged
from kv_policy import Observe

Make: TypeAlias = Callable[..., Any]
DIMS = [(5, 7), (3, 2), (6, 6)]  # of keys and values, by group
HEADS = [torch.tensor([1, 4]), torch.tensor([0]), torch.tensor([3, 2])]
WATCH = Observe(last=2, also=frozenset({"squares"}))


def groups_of(case: Make, **options: Any) -> tuple[list[Any], Tensor, list[HeadGroup]]:
    """Return a case per group of heads, queries of all heads padded to 7, and the groups."""
    cases = [
        case(i, H=len(heads), D=d, Dv=dv, tiers=(("8", "4"), ("4", "float16")), **options)
        for i, (heads, (d, dv)) in enumerate(zip(HEADS, DIMS, strict=True))
    ]
    first = cases[0]
    q = torch.zeros(*first.q.shape[:1], 5, *first.q.shape[2:4], 7)
    for heads, each in zip(HEADS, cases, strict=True):
        assert torch.equal(each.position, first.position)
        q[:, heads, ..., : each.q.shape[-1]] = each.q
    found = [
        HeadGroup(heads, tuple(each.pages), tuple(each.dense), tuple(each.page_positions))
        for heads, each in zip(HEADS, cases, strict=True)
    ]
    return cases, q, found


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("skip", [0, 2])
def test_each_group_attends_as_it_would_alone(case: Make, length: int, skip: int) -> None:
    cases, q, groups = groups_of(case, L=length)
    watch = replace(WATCH, skip=skip)
    result = attend_ragged(q, cases[0].position, groups, 7, 0.3, watch, others=[Observe(last=1)])
    assert result.out.shape == (2, 5, 2, length, 7)
    for heads, each in zip(HEADS, cases, strict=True):
        alone = each.attend(watch, others=[Observe(last=1)])
        dim = alone.out.shape[-1]
        assert torch.equal(result.out[:, heads, ..., :dim], alone.out)
        assert not result.out[:, heads, ..., dim:].any()
        for mine, theirs in ((result, alone), (result.others[0], alone.others[0])):
            for name in ("mass", "seen"):
                for a, b in zip(getattr(mine, name), getattr(theirs, name), strict=True):
                    assert torch.equal(a[:, heads, : b.shape[-1]], b)
                    assert not a[:, heads, b.shape[-1] :].any()
        squares = zip(result.also, alone.also, strict=True)
        assert all(
            torch.equal(a["squares"][:, heads, : b["squares"].shape[-1]], b["squares"])
            for a, b in squares
        )


def test_a_store_that_is_empty_in_some_groups_or_in_all(case: Make) -> None:
    cases, q, groups = groups_of(case)
    bare = [replace(g, pages=(None, *g.pages[1:])) for g in groups]
    some = [bare[0], *groups[1:]]
    result = attend_ragged(q, cases[0].position, some, 7, 0.3, Observe(last=2))
    assert len(result.mass) == 3
    assert not result.mass[0][:, HEADS[0]].any()
    assert result.mass[0][:, HEADS[1]].any()
    assert result.mass[1][:, HEADS[0]].any()
    none = attend_ragged(q, cases[0].position, bare, 7, 0.3, Observe(last=2))
    assert [x.shape[-1] for x in none.mass] == [0, *(x.shape[-1] for x in result.mass[1:])]


def test_it_is_attention_over_padded_vectors() -> None:
    place = torch.arange(6).expand(2, -1)
    q, k, v = (torch.randn(2, 3, 6, 8, dtype=torch.float64) for _ in range(3))
    there = torch.arange(8) < torch.tensor([8, 2, 5])[:, None]
    q, k, v = (x * there[:, None] for x in (q, k, v))
    whole = attend(q[:, :, None], place, [], [DenseTokens(k, v, place)], 0.5).out
    groups = [
        HeadGroup(
            torch.tensor([h]),
            (),
            (DenseTokens(k[:, h : h + 1, :, :d], v[:, h : h + 1, :, :d], place),),
        )
        for h, d in enumerate((8, 2, 5))
    ]
    ragged = attend_ragged(q[:, :, None], place, groups, 8, 0.5).out
    torch.testing.assert_close(ragged, whole, rtol=1e-12, atol=1e-12)
    assert torch.equal(pad(ragged[..., :5], (0, 3))[:, 2], ragged[:, 2])
