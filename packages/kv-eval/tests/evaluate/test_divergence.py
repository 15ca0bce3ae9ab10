"""Divergences from the full cache, against their definition in float64."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_eval.evaluate.decode import forced, read
from kv_eval.evaluate.divergence import Reference, divergence, scored, tail
from kv_eval.evaluate.journal import Finished, Journal
from kv_eval.evaluate.plan import Plan
from kv_eval.evaluate.report import rows
from kv_eval.evaluate.runner import run
from kv_eval.tasks import Text
from kv_transformers.from_text import FULL, make_cache
from kv_transformers.models import LoadedModel

PLAN = Plan((FULL, "k4v2"), ("nll",), ("agnostic",), length=61, samples=3, batch=2, continuation=7)


def defined(other: list[float], reference: list[float]) -> float:
    """Compute a divergence by its definition, with exact sums of doubles."""

    def logs(values: list[float]) -> list[float]:
        most = max(values)
        whole = most + math.log(math.fsum(math.exp(value - most) for value in values))
        return [value - whole for value in values]

    pairs = zip(logs(reference), logs(other), strict=True)
    return math.fsum(math.exp(p) * (p - q) for p, q in pairs if p > -math.inf)


@given(
    rows=st.integers(1, 5),
    vocabulary=st.integers(2, 67),
    scale=st.floats(0.1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    seed=st.integers(0, 2**31),
)
def test_a_divergence_is_what_its_definition_says(rows, vocabulary, scale, dtype, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(rows, vocabulary, generator=generator) * scale for _ in range(2))
    p, q = p.to(dtype), q.to(dtype)
    found = divergence(q, p)
    assert found.dtype == torch.float64
    pairs = zip(q.double().tolist(), p.double().tolist(), strict=True)
    expected = [defined(*pair) for pair in pairs]
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert divergence(p, p).abs().max() == 0
    assert found.min() >= 0


def test_a_token_that_the_reference_excludes_counts_nothing() -> None:
    p, q = torch.tensor([[0.3, -1.7, -math.inf]]), torch.tensor([[0.1, 0.4, 2.0]])
    (expected,) = (defined(*map(list, pair)) for pair in zip(q.tolist(), p.tolist(), strict=True))
    assert divergence(q, p).item() == pytest.approx(expected, rel=1e-12)
    assert divergence(p, q).item() == math.inf


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=2500))
def test_the_tail_leaves_a_thousandth_above(values) -> None:
    found, place = tail(values), 0.999 * (len(values) - 1)
    low, high = (sorted(values)[f(place)] for f in (math.floor, math.ceil))
    assert found == pytest.approx(low + (place - math.floor(place)) * (high - low), rel=1e-12)
    with pytest.raises(ValueError, match="at least one"):
        tail([])


def test_logits_that_nobody_recorded_are_computed_once() -> None:
    made = []

    def computed():
        made.append(torch.randn(2, 5, generator=torch.Generator().manual_seed(0)))
        return iter(made)

    reference = Reference(computed)
    steps = [torch.randn(2, 5)]
    assert torch.equal(next(reference.recorded(steps)), steps[0])
    assert torch.equal(reference.steps[0], steps[0])
    assert not made
    other = Reference(computed)
    assert other.steps is other.steps
    assert len(made) == 1
    nats, apart = scored(steps, torch.tensor([[1], [3]]), other)
    assert apart == [tuple(each) for each in divergence(steps[0], made[0])[:, None].tolist()]
    logp = steps[0].log_softmax(-1)
    assert nats == pytest.approx([-logp[0, 1].item(), -logp[1, 3].item()])


def test_a_run_measures_each_target_against_one_pass_in_float64(
    loaded: LoadedModel, text: Text, tmp_path: Path
) -> None:
    entries = list(run(loaded, PLAN, text, Journal.start(tmp_path / "partial", {})))
    oracle = type(loaded.model)(loaded.model.config).eval()
    oracle.load_state_dict(loaded.model.state_dict())
    oracle.double()
    samples = PLAN.samples_of(loaded, text, "nll", "agnostic")
    for sample, entry in zip(samples, (e for e in entries if e.policy == "k4v2"), strict=True):
        ids = torch.tensor([(*sample.prompt_ids, *sample.question_ids, *sample.target_ids)])
        with torch.no_grad():
            full = oracle(ids).logits[0, sample.length - 1 : -1]
        cache = make_cache(loaded.model, "k4v2")
        read(loaded.model, cache, torch.tensor([sample.prompt_ids]))
        logits = read(loaded.model, cache, torch.tensor([sample.question_ids]))
        targets = torch.tensor([sample.target_ids])
        steps = [*forced(loaded.model, cache, logits, targets)]
        expected = [defined(a[0].tolist(), b.tolist()) for a, b in zip(steps, full, strict=True)]
        assert len(entry.divergences) == 7
        assert entry.divergences == pytest.approx(expected, rel=1e-3, abs=1e-7)
        assert max(entry.divergences) > 1e-5
    assert {e.divergences for e in entries if e.policy == FULL} == {()}


def test_a_row_has_the_mean_and_the_tail_over_all_tokens(
    loaded: LoadedModel, text: Text, tmp_path: Path
) -> None:
    journal = Journal.start(tmp_path / "partial", {})
    entries = [e for e in run(loaded, PLAN, text, journal) if e.policy == "k4v2"]
    full, row = rows(PLAN, journal)
    values = [value for entry in entries for value in entry.divergences]
    assert row.divergence == pytest.approx(sum(values) / len(values))
    assert row.divergence_tail == tail(values)
    assert row.divergence_interval is not None
    low, high = row.divergence_interval
    assert low < row.divergence < high
    assert (full.divergence, full.divergence_interval, full.divergence_tail) == (None, None, None)


def test_samples_without_divergences_have_none_in_their_row(tmp_path: Path) -> None:
    journal = Journal.start(tmp_path / "partial", {})
    plan = replace(PLAN, samples=2)
    for policy, apart in ((FULL, ((), ())), ("k4v2", ((0.5,), ()))):
        journal.append(
            Finished(
                policy=policy,
                task="nll",
                setting="agnostic",
                sample=i,
                score=2.0,
                kv_bytes=1,
                full_bytes=2,
                seconds=0.0,
                divergences=each,
            )
            for i, each in enumerate(apart)
        )
    assert [row.divergence for row in rows(plan, journal)] == [None, None]


def test_a_divergence_that_is_not_finite_is_an_error(
    loaded: LoadedModel, text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def infinite(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        return torch.full(logits.shape[:-1], math.inf, dtype=torch.float64)

    monkeypatch.setattr("kv_eval.evaluate.divergence.divergence", infinite)
    journal = Journal.start(tmp_path / "partial", {})
    with pytest.raises(FloatingPointError, match="divergence of k4v2 from the full cache is inf"):
        list(run(loaded, PLAN, text, journal))
