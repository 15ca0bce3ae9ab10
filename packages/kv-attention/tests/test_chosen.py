"""Attention to a set of tokens per query, such as those that an indexer chooses."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_cases import Case, random_case
from attention_judge import (
    FORMAT,
    SHAPES,
    WATCHED_SHAPES,
    assert_same_observation,
    assert_same_output,
)
from kv_attention import DenseTokens, HeadGroup, all_backends, attend, attend_ragged
from kv_attention.checks import check_chosen
from kv_policy import Backend, Observe

BACKENDS = ["reference", "torch"]
EXACT: dict[str, Any] = {"dtype": torch.float64, "known": False}


def choosing(case: Case, seed: int, share: float, short: int = 0) -> Case:
    """Return the case with random chosen tokens, of fewer positions than there are if `short`."""
    g = torch.Generator().manual_seed(seed + 1000)
    places = [x.amax() for x in (*case.page_positions, *(d.position for d in case.dense))]
    positions = max(1, int(max(places, default=torch.tensor(0))) + 1 - short)
    shape = (*case.position.shape, positions)
    return replace(case, chosen=torch.rand(shape, generator=g) < share)


@settings(max_examples=40)
@given(
    st.integers(0, 99),
    SHAPES,
    st.lists(st.tuples(FORMAT, FORMAT), max_size=3),
    st.sampled_from([0.05, 0.4, 0.9]),
    st.sampled_from([0, 3]),
)
@pytest.mark.parametrize("room", [1 << 19, 50])
def test_any_cache(room, seed, shape, tiers, share, short) -> None:
    with patch("kv_attention.parts.ROOM", room):
        assert_same_output(choosing(random_case(seed, tiers=tiers, **shape), seed, share, short))


@settings(max_examples=30)
@given(
    st.integers(0, 99),
    WATCHED_SHAPES,
    st.sampled_from([0.05, 0.4]),
    st.sampled_from(["sum", "mean", "max", "max-of-sums"]),
    st.sampled_from([None, 2, 5]),
    st.sampled_from([{}, {"skip": 4}, {"gumbel": 0.7}, {"above": 0.5}, {"power": 2}]),
)
def test_every_observation(seed, shape, share, group, last, more) -> None:
    observe = Observe(last, group, also=frozenset({"squares", "entropy"}), **more)
    case = choosing(random_case(seed, **shape, dtype=torch.float64), seed, share)
    assert_same_observation(case, observe, error=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("L", [1, 9])
def test_tokens_that_are_not_chosen_are_as_if_absent(backend: str, L: int) -> None:
    """Each query alone over a cache of its tokens only."""
    g = torch.Generator().manual_seed(3)
    case = random_case(3, B=1, L=L, tiers=(), window=6, stored=0, sinks=True, **EXACT)
    case = choosing(case, 3, 0.5)
    case.chosen[torch.rand(case.chosen.shape, generator=g) < 0.1] = True
    key, value = (
        torch.cat([getattr(d, name) for d in case.dense], 2).nan_to_num()
        for name in ("key", "value")
    )
    place = torch.cat([d.position for d in case.dense], 1)
    found = case.attend(Observe(None), backend)
    for i in range(L):
        sees = (place[0] >= 0) & (place[0] <= case.position[0, i])
        mine = sees & case.chosen[0, i][place[0].clamp(min=0)]
        only = mine if mine.any() else sees
        tokens = DenseTokens(key[:, :, only], value[:, :, only], place[:, only])
        at = slice(i, i + 1)
        alone = replace(
            case, q=case.q[..., at, :], position=case.position[:, at], dense=[tokens], chosen=None
        )
        want = alone.attend(backend=backend).out
        torch.testing.assert_close(found.out[..., at, :], want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_tokens_chosen_is_attention_to_all(backend: str) -> None:
    case = random_case(4, L=7, window=4, padding="left", softcap=1.5, **EXACT)
    all_chosen = choosing(case, 4, 2.0)
    found, want = (x.attend(Observe(None), backend) for x in (all_chosen, case))
    torch.testing.assert_close(found.out, want.out, rtol=1e-11, atol=1e-12)
    for mine, theirs in zip((*found.mass, *found.seen), (*want.mass, *want.seen), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_head_without_any_chosen_token_attends_to_all_that_it_holds(backend: str) -> None:
    case = random_case(5, B=1, H=2, L=1, tiers=[("8", "8")], ragged=False, **EXACT)
    case.pages[0].length[0, 1] = 3  # this head has dropped the token at position 7
    chosen = torch.zeros(1, 1, 8, dtype=torch.bool)
    chosen[..., 7] = True
    found = replace(case, chosen=chosen).attend(Observe(None), backend)
    all_held = case.attend(Observe(None), backend)
    torch.testing.assert_close(found.out[:, 1], all_held.out[:, 1], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(found.mass[0][:, 1], all_held.mass[0][:, 1])
    mass: Tensor = found.mass[0][0, 0]
    assert mass.nonzero().tolist() == [[7]]
    assert mass[7] == 1


def test_other_backends_leave_it_to_torch(monkeypatch) -> None:
    other = Backend("other", "does not know chosen tokens", lambda: lambda inputs: 1 / 0)
    known = {**all_backends(), "other": other}
    monkeypatch.setattr("kv_attention.backends.all_backends", lambda: known)
    case = choosing(random_case(6, L=3), 6, 0.4)
    found, want = (case.attend(backend=name).out for name in ("other", "torch"))
    assert torch.equal(found, want)
    with pytest.raises(ZeroDivisionError):
        replace(case, chosen=None).attend(backend="other")
    with pytest.raises(ValueError, match="unknown backend 'nothing'"):
        case.attend(backend="nothing")


def test_heads_of_several_ranks_choose_alike() -> None:
    case = choosing(random_case(7, H=3, L=4, window=3, **EXACT), 7, 0.3)
    groups = []
    for heads in (torch.tensor([2]), torch.tensor([0, 1])):
        (pages,) = case.pages
        mine = replace(
            pages, table=pages.table[:, heads], length=pages.length[:, heads].contiguous()
        )
        dense = tuple(
            DenseTokens(d.key[:, heads], d.value[:, heads], d.position) for d in case.dense
        )
        groups.append(HeadGroup(heads, (mine,), dense, (case.page_positions[0][:, heads],)))
    found = attend_ragged(case.q, case.position, groups, 5, case.scale, chosen=case.chosen)
    torch.testing.assert_close(found.out, case.attend().out, rtol=1e-11, atol=1e-12)


def test_what_does_not_mark_the_tokens_of_each_query_is_refused() -> None:
    case = random_case(8, L=3)
    for wrong in (
        torch.ones(2, 2, 9, dtype=torch.bool),
        torch.ones(2, 3, 9),
        torch.ones(2, 3, 0, dtype=torch.bool),
        torch.ones(2, 1, 3, 9, dtype=torch.bool),
    ):
        with pytest.raises(ValueError, match="give booleans of shape"):
            check_chosen(case.q, wrong)
    chosen = torch.ones(2, 3, 9, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"give page_positions\[0\]"):
        attend(case.q, case.position, case.pages, case.dense, 1.0, chosen=chosen)
