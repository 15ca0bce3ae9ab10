"""D2O, CaM and KVMerger: each beside a plain loop over tokens."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from evict_cases import plan_view, quick, ragged
from kv_evict import D2O, H2O, CaM, KVMerger
from kv_evict import nearest as nearest_module
from kv_policy import (
    DROP,
    Budget,
    CompositionError,
    Evictor,
    LayerView,
    Merge,
    MergeView,
    Observe,
    Replan,
    RunningSum,
    complete,
    compose,
    parse,
)
from kv_policy.testing import check_policy
from merge_cases import VIEWS, expect_as_loop, merging, share_of, without_keys

EVERY = [D2O, CaM, KVMerger]


def tokens(view: MergeView, b: int, h: int) -> tuple[list[int], list[int]]:
    """Return the indices of the kept and of the dropped tokens of a head."""
    there = (view.position[b, h] >= 0).nonzero()[:, 0].tolist()
    kept = [i for i in there if view.kept[b, h, i]]
    return kept, [i for i in there if i not in kept]


def d2o(view: MergeView, b: int, h: int, beta: float) -> tuple[dict[tuple[int, int], float], float]:
    """Return the weights and the threshold of a head."""
    (kept, dropped), old = tokens(view, b, h), float(view.threshold[b, h])
    keys = view.keys[b, h]
    found = {(j, j): 1.0 for j in kept}
    if not (kept and dropped):
        return found, old
    near = {}
    for i in dropped:
        cosines = [float(torch.cosine_similarity(keys[i], keys[j], dim=0)) for j in kept]
        near[i] = max(cosines), kept[cosines.index(max(cosines))]
    mean = sum(u for u, _ in near.values()) / len(near)
    threshold = mean if old == 0 else beta * mean + (1 - beta) * old
    for j in kept:
        mine = {i: math.exp(u) for i, (u, at) in near.items() if at == j and u >= threshold}
        total = math.e + sum(mine.values())
        found[j, j] = math.e / total
        found |= {(i, j): w / total for i, w in mine.items()}
    return found, threshold


@given(**VIEWS, beta=st.sampled_from([0.0, 0.3, 1.0]))
@quick
def test_d2o_is_a_loop(
    seed: int, lengths: tuple[int, int], keep: float, *, first: bool, beta: float
) -> None:
    view = merging(seed, lengths, keep, first=first)
    merge = D2O(beta=beta).merge(view)
    assert merge.keys
    expect_as_loop(view, merge, lambda v, b, h: d2o(v, b, h, beta))


@given(**VIEWS)
@quick
def test_what_is_averaged_adds_up_to_one(
    seed: int, lengths: tuple[int, int], keep: float, *, first: bool
) -> None:
    """So a cache of equal tokens does not change, and a shift of all keys stays one."""
    view = merging(seed, lengths, keep, first=first)
    for method in (D2O(), KVMerger()):
        total = share_of(view, method.merge(view)).sum(2)
        torch.testing.assert_close(total, view.kept.double(), rtol=0, atol=1e-12)


def test_the_threshold_of_d2o_follows_its_plans() -> None:
    view, method = merging(5, (40, 30), 0.3, first=True), D2O(beta=0.25)
    first = method.merge(view).threshold
    assert first is not None
    assert bool((first > 0).all())
    again = method.merge(replace(view, threshold=first)).threshold
    torch.testing.assert_close(again, first)
    low = method.merge(replace(view, threshold=first - 1)).threshold
    torch.testing.assert_close(low, first - 0.75)
    whole = replace(view, kept=view.position >= 0, threshold=first - 1)
    assert torch.equal(method.merge(whole).threshold, first - 1)  # nothing is dropped


def test_cosines_are_computed_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    view = merging(7, (40, 33), 0.4, first=True)
    whole = D2O().merge(view)
    monkeypatch.setattr(nearest_module, "_TOGETHER", 1)
    parts = D2O().merge(view)
    assert torch.equal(whole.target, parts.target)
    torch.testing.assert_close(whole.weight, parts.weight, rtol=1e-12, atol=1e-12)


def cam(view: MergeView, b: int, h: int, targets: int) -> tuple[dict[tuple[int, int], float], None]:
    """Return the weights of a head, by their probability."""
    kept, dropped = tokens(view, b, h)
    score = view.score[b, h].tolist()
    found = {(j, j): 1.0 for j in kept}
    for i in dropped:
        after = [j for j in kept if j > i][:targets]
        known = [max(score[j], 0) for j in after if math.isfinite(score[j])]
        mean, mine = sum(known) / max(len(known), 1), max(score[i], 0)
        chance = min(mine / mean, 1) if mean else float(mine > 0)
        found |= {(i, j): chance / len(after) for j in after}
    return found, None


@given(**VIEWS, targets=st.sampled_from([1, 3, 32]))
@quick
def test_cam_is_a_loop(
    seed: int, lengths: tuple[int, int], keep: float, *, first: bool, targets: int
) -> None:
    view = merging(seed, lengths, keep, first=first)
    rare = torch.rand(view.score.shape, generator=torch.Generator().manual_seed(seed))
    score = view.score.masked_fill(rare < 0.2, 0).masked_fill(view.kept & (rare > 0.9), torch.inf)
    view = replace(view, score=torch.where(rare.sub(0.3).abs() < 0.05, -score, score))
    merge = CaM(targets=targets).merge(without_keys(view))
    assert not merge.keys
    expect_as_loop(view, merge, lambda v, b, h: cam(v, b, h, targets))


@given(**VIEWS, number=st.integers(0, 2**70))
@quick
def test_what_cam_draws_is_all_of_a_value_or_nothing(
    seed: int, lengths: tuple[int, int], keep: float, *, first: bool, number: int
) -> None:
    """Kept values with all that is drawn add up to what they were and the drawn ones."""
    view = merging(seed, lengths, keep, first=first)
    merge = CaM(targets=4, seed=number % 2**63).merge(view)
    share = share_of(view, merge)
    each = share.sum(-1)
    assert bool(((each - 1).abs() < 1e-12)[view.kept].all())
    drawn = each.round()
    torch.testing.assert_close(each, drawn, rtol=0, atol=1e-12)
    after = (share.mT @ view.values).sum(2)
    torch.testing.assert_close(after, (drawn[..., None] * view.values).sum(2))


def test_draws_of_cam_are_as_often_as_their_probability() -> None:
    length = 4000
    position = torch.arange(length).expand(1, 3, length)
    kept = position % 2 == 1
    one = merging(1, (9,), 0.5, first=True)
    view = replace(
        one,
        position=position,
        kept=kept,
        score=torch.where(kept, 1.0, 0.3),
        length=torch.tensor([length]),
        keys=torch.zeros(1, 3, length, one.keys.shape[-1]),
        values=torch.zeros(1, 3, length, one.values.shape[-1]),
    )
    drawn = []
    for seed in range(3):
        merge = CaM(targets=1, seed=seed).merge(view)
        drawn.append(merge.weight[..., 0][:, :, ::2])
    rate = torch.stack(drawn).mean((1, 3))
    assert bool(((rate - 0.3).abs() < 0.04).all())
    alike = [(a == b).float().mean() for a in drawn for b in drawn if a is not b]
    assert max(alike) < 0.65  # 0.58 of independent draws are equal
    heads = drawn[0][0]
    assert float((heads[0] == heads[1]).float().mean()) < 0.65


def runs(keys: Tensor, similar: float) -> list[int]:
    """Return the number of each token's run."""
    number = [0]
    for before, key in pairwise(keys):
        cosine = float(normalize(before, dim=0) @ normalize(key, dim=0))
        number.append(number[-1] + (cosine < similar))
    return number


def kvmerger(
    view: MergeView, b: int, h: int, similar: float
) -> tuple[dict[tuple[int, int], float], None]:
    """Return the weights of a head."""
    kept, dropped = tokens(view, b, h)
    keys, score = view.keys[b, h], view.score[b, h].tolist()
    run = runs(keys, similar)
    found = {(j, j): 1.0 for j in kept}
    for number in set(run):
        inside = [j for j in kept if run[j] == number]
        lost = [i for i in dropped if run[i] == number]
        if not (inside and lost):
            continue
        pivot = max(inside, key=lambda j: (score[j], -j))
        far = {i: float((keys[i] - keys[pivot]).norm()) for i in lost}
        width = sum(far.values()) / len(far)
        near = {i: math.exp(-((x / width) ** 2) / 2) if width else 1.0 for i, x in far.items()}
        total = 1 + sum(near.values())
        found[pivot, pivot] = 1 / total
        found |= {(i, pivot): x / total for i, x in near.items()}
    return found, None


@given(**VIEWS, similar=st.sampled_from([0.2, 0.75, 0.95]))
@quick
def test_kvmerger_is_a_loop(
    seed: int, lengths: tuple[int, int], keep: float, *, first: bool, similar: float
) -> None:
    view = merging(seed, lengths, keep, first=first)
    merge = KVMerger(similar=similar).merge(view)
    expect_as_loop(view, merge, lambda v, b, h: kvmerger(v, b, h, similar))


@given(**VIEWS)
@quick
def test_kvmerger_keeps_a_token_of_each_run_before_others(
    seed: int, lengths: tuple[int, int], keep: float, *, first: bool
) -> None:
    given = merging(seed, lengths, keep, first=first)
    view = LayerView(
        layer=given.layer,
        shape=given.shape,
        position=given.position,
        fresh=given.position >= 0,
        score=given.score,
        length=given.length,
        keys=given.keys,
    )
    found = KVMerger().rescore(view)
    for b, h in torch.cartesian_prod(*map(torch.arange, view.position.shape[:2])).tolist():
        there = (view.position[b, h] >= 0).nonzero()[:, 0].tolist()
        run, score = runs(given.keys[b, h], 0.75), given.score[b, h].tolist()
        best = {}
        for i in there:
            j = best.setdefault(run[i], i)
            best[run[i]] = i if score[i] > score[j] else j
        pivots = set(best.values())
        order = sorted(there, key=lambda i: (i in pivots, score[i]))
        mine = sorted(there, key=lambda i: float(found[b, h, i]))
        assert mine == order


def test_equal_keys_are_one_run_with_equal_weights() -> None:
    view = merging(2, (20, 20), 0.2, first=True)
    there = (view.position >= 0)[..., None]
    merge = KVMerger().merge(replace(view, keys=torch.ones_like(view.keys) * there))
    assert bool(merge.weight.isfinite().all())
    share = share_of(view, merge)
    for row in share.mT[view.kept]:
        assert len({round(x, 12) for x in row.tolist() if x}) == 1


def planned(policy: Evictor, budgets: list[int], position: Tensor) -> Tensor:
    """Return the plan of random scores for sequences of 50 and 20 tokens."""
    score = torch.rand(position.shape, generator=torch.Generator().manual_seed(3))
    return policy.plan(plan_view(score, position, [50, 20], budgets))


@pytest.mark.parametrize("method", EVERY)
def test_tokens_are_those_of_h2o(method: type[D2O] | type[CaM] | type[KVMerger]) -> None:
    position = ragged(3, 1, [50, 20], [9, 4])
    mine = planned(method(recent=0.5), [15, 9], position)
    if method is not D2O:  # which keeps sinks
        assert torch.equal(mine, planned(H2O(), [15, 9], position))
    assert method().observe == Observe(last=None, generated=True)
    assert method().running == RunningSum()
    assert method().replan == Replan(128)
    assert method(every=0).observe == Observe(last=None)
    assert method(every=0).running is None


def test_d2o_keeps_sinks() -> None:
    position = ragged(3, 1, [50, 20], [0, 0])
    plan = planned(D2O(recent=0.0), [4, 5], position)
    assert bool((plan[(position >= 0) & (position < 4)] != DROP).all())
    with pytest.raises(ValueError, match="smaller than the 4"):
        D2O(budget=Budget(3))


@pytest.mark.parametrize(
    "text",
    [
        "d2o:budget=30",
        "d2o:budget=30,every=0,beta=0.9,recent=0.0",
        "cam:budget=30,targets=2",
        "cam:budget=30,seed=7,every=0",
        "kvmerger:budget=30,similar=0.5",
        "d2o:budget=25%+raw",
        "snapkv:budget=40,window=4+d2o",
        "r-kv:budget=30+cam:seed=1",
        "ada-snapkv:budget=40+kvmerger",
    ],
)
def test_the_contract(text: str) -> None:
    check_policy(parse(text))


def test_a_method_merges_what_another_drops() -> None:
    policy = parse("snapkv:budget=40+d2o")
    assert policy == parse("d2o+snapkv:budget=40")
    assert str(policy) == "snapkv:budget=40+d2o"
    assert policy.selector is not None
    whole, view = complete(policy.selector), merging(4, (30, 20), 0.4, first=True)
    assert whole.merge is not None
    mine, alone = whole.merge(view), D2O().merge(view)
    assert isinstance(mine, Merge)
    assert torch.equal(mine.target, alone.target)
    assert torch.equal(mine.weight, alone.weight)
    assert whole.budget == Budget(40)
    assert whole.observe == parse("snapkv").selector.observe
    assert whole.rescore is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("d2o+cam", "d2o and cam both define which tokens are kept"),
        ("h2o+d2o", "h2o drops tokens at decode steps"),
        ("d2o+leankv:high=raw,low=raw", "leankv.* drops tokens at decode steps"),
        ("streaming:chunks=true,budget=64+cam", "streaming.* drops tokens after each chunk"),
        ("snapkv+d2o:budget=12", "its own budget has no effect"),
    ],
)
def test_what_does_not_merge_is_refused(text: str, message: str) -> None:
    with pytest.raises(CompositionError, match=message):
        parse(text)
    assert compose(parse("d2o"), parse("raw"))
