"""LeanKV against section 4 of the paper, written out token by token."""

import math
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kv_evict import LeanKV, Profile
from kv_policy import (
    DROP,
    FRESH,
    NOBODY,
    CacheShape,
    LayerView,
    NotCalibratedError,
    PlanView,
    StepView,
    UnknownPolicyError,
    compose,
    parse,
)
from kv_policy.testing import check_policy

SHAPE = CacheShape(layers=1, kv_heads=1, group=2, key_dim=8, value_dim=8)


def lean(**changes: object) -> LeanKV:
    """Raw tiers, because the formats are in another package."""
    return LeanKV(**{"high": "raw", "low": "raw", "window": 0, **changes})


def plan_view(score: Tensor, tier: Tensor | None = None, aside: Tensor | None = None) -> PlanView:
    batch, length = score.shape[1], score.shape[3]
    return PlanView(
        shape=SHAPE,
        first_layer=0,
        score=score,
        position=torch.arange(length).expand(score.shape),
        tier=torch.full(score.shape, FRESH, dtype=torch.uint8) if tier is None else tier,
        length=torch.full((batch,), length),
        budget=torch.full((batch,), length),
        aside=aside,
    )


def step_view(
    candidate: float, high: list[float], low: list[float], tier_thresholds: tuple
) -> StepView:
    def cell(x: float) -> Tensor:
        return torch.full((1, 1, 1), x)

    return StepView(
        shape=SHAPE,
        first_layer=0,
        candidate=cell(candidate),
        weakest=torch.stack([cell(min(t, default=math.inf)) for t in (high, low)]),
        count=torch.stack([cell(len(t)) for t in (high, low)]).long(),
        tier_thresholds=torch.stack([cell(c) for c in tier_thresholds]),
        length=torch.tensor([1]),
        budget=torch.tensor([1]),
    )


@pytest.mark.parametrize(
    "policy",
    [
        lean(),
        lean(low="drop"),
        lean(t_low=0.01, window=5),
        lean(form="token", alpha_low=0.02),
        lean(group="mean", last=7),
    ],
    ids=str,
)
def test_it_satisfies_the_contract(policy: LeanKV) -> None:
    check_policy(policy)


def by_hand(scores: list[float], total: float, t_high: float, t_low: float) -> list[int]:
    """Sort, add up, compare: the prompt phase."""
    tiers, mass = [0] * len(scores), 0.0
    for i in sorted(range(len(scores)), key=lambda i: scores[i]):
        mass += scores[i] / total
        tiers[i] = DROP if mass < t_low else 1 if mass < t_high else 0
    return tiers


@given(
    scores=st.lists(st.integers(1, 10**6), min_size=1, max_size=40),
    aside=st.integers(0, 10**6),
    t_low=st.sampled_from([0.0, 0.001, 0.05, 0.3]),
    t_high=st.sampled_from([0.3, 0.5, 0.9, 1.0]),
)
def test_a_prompt_is_sorted_by_what_its_tokens_add_up_to(
    scores: list[int], aside: int, t_low: float, t_high: float
) -> None:
    score = torch.tensor(scores, dtype=torch.float64)[None, None, None]
    view = plan_view(score, aside=torch.full((1, 1, 1), float(aside), dtype=torch.float64))
    plan = lean(t_high=t_high, t_low=t_low).plan(view).flatten().tolist()
    want = by_hand([float(s) for s in scores], sum(scores) + aside, t_high, t_low)
    # rounding may decide a token whose sum meets a threshold exactly
    order = sorted(range(len(scores)), key=lambda i: scores[i])
    sums = dict(zip(order, torch.tensor(scores)[order].cumsum(0).tolist(), strict=True))
    whole = sum(scores) + aside
    for i, (got, right) in enumerate(zip(plan, want, strict=True)):
        near = any(abs(sums[i] / whole - t) < 1e-12 for t in (t_low, t_high))
        assert got == right or near


def test_without_a_low_tier_what_is_not_high_is_pruned() -> None:
    score = torch.tensor([0.01, 0.02, 0.07, 0.9])[None, None, None]
    assert lean(t_high=0.05).plan(plan_view(score)).flatten().tolist() == [1, 1, 0, 0]
    dropped = lean(low="drop", t_high=0.05).plan(plan_view(score))
    assert dropped.flatten().tolist() == [DROP, DROP, 0, 0]


def test_a_stored_token_never_goes_back() -> None:
    score = torch.tensor([0.9, 0.05, 0.04, 0.01])[None, None, None]
    tier = torch.tensor([1, 0, FRESH, FRESH], dtype=torch.uint8)[None, None, None]
    plan = lean(t_high=0.06).plan(plan_view(score, tier))
    assert plan.flatten().tolist() == [1, 0, 1, 1]


def algorithm_1(
    candidate: float, high: list[float], low: list[float], t_high: float, t_low: float
) -> tuple[list[float], list[float]]:
    """The paper's listing, line by line."""
    high, low = list(high), list(low)
    if candidate >= t_high:
        high.append(candidate)
        victim = min(high)
        if t_low <= victim < t_high:
            high.remove(victim)
            low.append(victim)
        elif victim < t_low:
            high.remove(victim)
    elif candidate >= t_low:
        low.append(candidate)
        victim = min(low)
        if victim < t_low:
            low.remove(victim)
    return sorted(high), sorted(low)


def carried_out(
    policy: LeanKV, candidate: float, high: list[float], low: list[float], tier_thresholds: tuple
) -> tuple[list[float], list[float]]:
    step = policy.step(step_view(candidate, high, low, tier_thresholds))
    tiers = [list(high), list(low)]
    if step.victim.item() != NOBODY:
        victim = min(tiers[step.victim.item()])
        tiers[step.victim.item()].remove(victim)
        if step.target.item() != DROP:
            tiers[step.target.item()].append(victim)
    if step.candidate.item() != DROP:
        tiers[step.candidate.item()].append(candidate)
    return sorted(tiers[0]), sorted(tiers[1])


@settings(max_examples=100)
@given(
    scores=st.lists(st.integers(0, 20), min_size=1, max_size=12, unique=True),
    split=st.integers(0, 12),
    t_low=st.integers(1, 10),
    more=st.integers(0, 10),
)
def test_a_step_is_algorithm_1(scores: list[int], split: int, t_low: int, more: int) -> None:
    candidate, *stored = (float(s) for s in scores)
    high, low = stored[:split], stored[split:]
    t_high = t_low + more
    got = carried_out(lean(t_low=0.01), candidate, high, low, (float(t_high), float(t_low)))
    assert got == algorithm_1(candidate, high, low, t_high, t_low)


def test_a_step_asks_for_less_as_the_sequence_grows() -> None:
    view = step_view(0.4, [0.9], [], (4.0, 0.0))
    near = lean().step(view)
    assert near.candidate.item() == 1
    far = lean().step(replace(view, length=torch.tensor([10])))
    assert far.candidate.item() == 0


def test_the_cut_of_a_prompt_is_its_least_high_token_times_its_length() -> None:
    score = torch.tensor([0.01, 0.02, 0.07, 0.9])[None, None, None]
    tier_thresholds = lean(t_high=0.05, t_low=0.02).tier_thresholds(plan_view(score))
    torch.testing.assert_close(tier_thresholds.flatten(), torch.tensor([0.07 * 4, 0.02 * 4]))
    none_below = lean(t_high=0.0).tier_thresholds(plan_view(score))
    assert none_below.flatten().tolist() == [0, 0]  # no threshold


def test_a_prompt_with_too_little_to_sort_takes_the_fixed_thresholds() -> None:
    score = torch.tensor([0.01, 0.02, 0.07, 0.9])[None, None, None]
    policy = lean(window=5, alpha_high=0.7, alpha_low=0.1)
    torch.testing.assert_close(
        policy.tier_thresholds(plan_view(score)).flatten(), torch.tensor([0.7, 0.1])
    )


def test_the_token_form_compares_each_score_with_its_share_of_an_even_split() -> None:
    score = torch.tensor([0.01, 0.2, 0.3, 0.49])[None, None, None]
    policy = lean(form="token", alpha_high=1.0, alpha_low=0.1)
    assert policy.plan(plan_view(score)).flatten().tolist() == [DROP, 1, 0, 0]
    torch.testing.assert_close(
        policy.tier_thresholds(plan_view(score)).flatten(), torch.tensor([1.0, 0.1])
    )


def test_both_forms_agree_where_a_heads_own_cut_is_the_fixed_one() -> None:
    score = torch.rand(1, 1, 1, 50, dtype=torch.float64)
    score /= score.sum()
    by_mass = lean(t_high=0.3, t_low=0.02)
    tier_thresholds = by_mass.tier_thresholds(plan_view(score)).flatten().tolist()
    # a tolerance, so that rounding does not decide about the token that set the threshold
    alpha = {
        "alpha_high": tier_thresholds[0] * (1 - 1e-6),
        "alpha_low": tier_thresholds[1] * (1 - 1e-6),
    }
    by_token = lean(form="token", **alpha)
    assert torch.equal(by_mass.plan(plan_view(score)), by_token.plan(plan_view(score)))


@pytest.mark.parametrize("last", [None, 3])
def test_a_score_is_the_average_attention_of_later_queries(last: int | None) -> None:
    """Chunks of a prompt and generated tokens, against the whole attention matrix."""
    total, policy = 17, lean(last=last)
    attention = torch.rand(total, total, dtype=torch.float64).tril()  # query, token
    score, start = torch.zeros(1, 1, 0, dtype=torch.float64), 0
    for count in (6, 5, 1, 1, 1, 1, 1, 1):
        end = start + count
        watched = range(start if last is None else max(start, end - last), end)
        rows = torch.zeros_like(attention)
        rows[list(watched)] = attention[list(watched)]
        counted = (rows > 0) & torch.ones_like(rows, dtype=torch.bool).tril(-1)
        view = LayerView(
            layer=torch.tensor([0]),
            shape=SHAPE,
            position=torch.arange(end)[None, None],
            fresh=(torch.arange(end) >= start)[None, None],
            score=torch.cat([score, score.new_zeros(1, 1, count)], -1),
            length=torch.tensor([end]),
            mass=(rows * counted).sum(0)[:end][None, None],
            seen=counted.sum(0)[:end][None, None],
        )
        score, start = policy.score(view), end
    want = (attention.tril(-1).sum(0) / torch.arange(total - 1, -1, -1).clamp(min=1))[None, None]
    if last is None:
        torch.testing.assert_close(score, want)
    else:  # the newest queries weigh 1 / (last + 1) each, so the oldest fade
        assert (score[..., :-1] > 0).all()
        fade = policy.score(
            LayerView(
                layer=torch.tensor([0]),
                shape=SHAPE,
                position=torch.arange(total)[None, None],
                fresh=(torch.arange(total) == total - 1)[None, None],
                score=score,
                length=torch.tensor([total]),
                mass=torch.zeros_like(score),
                seen=torch.ones_like(score).long(),
            )
        )
        torch.testing.assert_close(fade[0, 0, 0], score[0, 0, 0] * last / (last + 1))


def simulate(steps: int, t_low: float, lifetime: float) -> tuple[Tensor, Tensor]:
    """Generate with many heads; some tokens get attention permanently, others for a while.

    Return the tokens of both tiers, and the length, at every step, [steps, 2] and [steps].
    """
    generator = torch.Generator().manual_seed(0)
    heads, prompt, window = 64, 400, 16
    policy = lean(t_high=0.2, t_low=t_low, window=window)
    worth = torch.rand(heads, prompt + steps, generator=generator) ** 6 + 0.01
    born = torch.arange(prompt + steps).float()
    tiers = torch.full((heads, prompt + steps), FRESH, dtype=torch.uint8)
    score = torch.zeros(heads, prompt + steps)
    counts, lengths, tier_thresholds = [], [], torch.zeros(2, 1, 1, heads)
    for n in range(1, prompt + steps):
        held = (tiers != DROP) & (torch.arange(prompt + steps) < n)
        age = n - born
        look = worth * (0.05 + torch.exp(-age / lifetime)) * held
        p = look / look.sum(-1, keepdim=True)
        past = (n - 1 - torch.arange(prompt + steps)).clamp(min=0)
        score = torch.where(held, (score * past + p) / (past + 1), score)
        if n < prompt:
            continue
        old = torch.arange(prompt + steps) < n - window
        if n == prompt:
            view = plan_view(score[None, None, :, :n].masked_fill(~held[:, :n], 0))
            position = torch.where(old[:n], torch.arange(n), -1).expand(1, 1, heads, n)
            aside = score[:, :n].masked_fill(old[:n], 0).sum(-1)[None, None]
            view = replace(view, position=position, aside=aside)
            tiers[:, :n] = torch.where(old[:n], policy.plan(view)[0, 0], FRESH)
            tier_thresholds = policy.tier_thresholds(view)
        else:
            entering = n - window - 1
            inside = [(tiers == k) & old & held for k in (0, 1)]
            inside = [m & (torch.arange(prompt + steps) != entering) for m in inside]
            stored = [score.masked_fill(~m, torch.inf) for m in inside]
            step = policy.step(
                StepView(
                    shape=SHAPE,
                    first_layer=0,
                    candidate=score[None, None, :, entering],
                    weakest=torch.stack([s.amin(-1) for s in stored])[:, None, None],
                    count=torch.stack([m.sum(-1) for m in inside])[:, None, None],
                    tier_thresholds=tier_thresholds,
                    length=torch.tensor([n]),
                    budget=torch.tensor([n]),
                )
            )
            for k in (0, 1):
                moves = step.victim[0, 0] == k
                slot = stored[k].argmin(-1)
                tiers[moves, slot[moves]] = step.target[0, 0][moves]
            tiers[:, entering] = step.candidate[0, 0]
        counts.append([float((tiers == k).sum()) / heads for k in (0, 1)])
        lengths.append(n)
    return torch.tensor(counts), torch.tensor(lengths)


@pytest.mark.grid(2)
@pytest.mark.parametrize("lifetime", [40.0, 1e9])
@pytest.mark.parametrize("t_low", [0.0, 0.01])
def test_a_long_generation_neither_drains_nor_floods_a_tier(t_low: float, lifetime: float) -> None:
    counts, lengths = simulate(800, t_low, lifetime)
    share = counts / lengths[:, None]
    first, later = share[0], share[len(share) // 2 :]
    assert (first > 0.05).all()
    assert (later > first / 3).all(), (first, later.amin(0))
    assert (later < (3 * first).clamp(max=0.97)).all(), (first, later.amax(0))


def write(path: Path, **changes: object) -> str:
    whole = {
        "model": "tiny",
        "fingerprint": "0123456789abcdef",
        "high": "raw",
        "low": "drop",
        "t_high": 0.1,
        "t_low": 0.0,
        "max_loss": 0.05,
        "tasks": ("needle",),
        "length": 2000,
        "bytes_ratio": 0.3,
    }
    Profile(**{**whole, **changes}).save(path)
    return str(path)


def test_a_profile_gives_formats_and_thresholds(tmp_path: Path) -> None:
    path = write(tmp_path / "found.json")
    policy = parse(f"leankv:profile={path}")
    assert isinstance(policy, LeanKV)
    assert (policy.high, policy.low, policy.t_high, policy.tiers) == ("raw", "drop", 0.1, 1)
    assert policy.fitted_to == "0123456789abcdef"
    assert parse(str(policy)) == policy
    assert compose(policy).fitted_to == "0123456789abcdef"
    assert lean().fitted_to is None


def test_what_contradicts_a_profile_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "found.json")
    with pytest.raises(ValueError, match=r"t_high=0.2 contradicts the profile .* has 0.1"):
        LeanKV(profile=path, t_high=0.2)


def test_bad_profiles_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(NotCalibratedError, match="does not exist"):
        LeanKV(profile=str(tmp_path / "missing.json"))
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(ValueError, match="is a directory; name a file in it"):
        parse(f"leankv:profile={tmp_path}")
    missing = re.escape(f"`kv-serve calibrate leankv --model MODEL --out {tmp_path / 'none'}`")
    with pytest.raises(NotCalibratedError, match=missing):
        parse(f"leankv:profile={tmp_path / 'none'}")
    with pytest.raises(ValueError, match="is not a leankv profile"):
        LeanKV(profile=str(tmp_path / "text.json"))
    (tmp_path / "wrong.json").write_bytes(msgspec.json.encode({"format": "leankv profile 1"}))
    with pytest.raises(ValueError, match="missing required field"):
        LeanKV(profile=str(tmp_path / "wrong.json"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("high=raw,low=raw,t_high=0.05,t_low=0.2", "t_low=0.2 is above t_high=0.05"),
        ("high=raw,low=raw,t_high=1.5", "t_high=1.5 is refused"),
        ("high=raw,low=raw,t_low=-0.1", "t_low=-0.1 is refused"),
        ("high=raw,low=raw,alpha_high=1,alpha_low=2", "alpha_low=2.0 is above alpha_high=1.0"),
        ("high=raw,low=drop,t_low=0.01", "t_high sets what is pruned"),
        ("high=snapkv,low=raw", "snapkv is not a format of a tier"),
        ("high=raw,low=raw,last=0", "last=0 is refused"),
        ("high=raw,low=raw,form=sum", "form=sum is refused"),
    ],
)
def test_bad_input_gets_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse(f"leankv:{text}")


def test_a_format_that_is_not_installed_says_where_formats_come_from() -> None:
    with pytest.raises(
        UnknownPolicyError, match=r"are in the package kv-quant: `.* install .*kv-quant`"
    ):
        LeanKV(high="k99v1")


def test_what_adds_up_to_a_threshold_but_for_rounding_reaches_it() -> None:
    # The attention of a head sums to 1 in any order: the best token reaches it.
    policy = lean(low="drop", t_high=1.0)
    for seed in range(20):
        score = torch.rand(1, 1, 2, 37, generator=torch.Generator().manual_seed(seed))
        for padding in (0, 64):
            view = plan_view(torch.nn.functional.pad(score, (0, padding)))
            view = replace(view, position=view.position.masked_fill(view.position >= 37, -1))
            kept = policy.plan(view) != DROP
            assert kept.sum(-1).tolist() == [[[1, 1]]]
            assert torch.equal(kept.int().argmax(-1), score.argmax(-1))
