"""Scores of heads on repeated tokens: the definition, and resuming."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kv_evict.heads_calibration import SINKS, HeadsCalibration
from kv_evict.heads_file import load
from kv_policy import CacheShape, Calibrated

SHAPE = CacheShape(layers=2, kv_heads=3, group=2, key_dim=8, value_dim=5)
PERIOD = 17


def passes(seed: int, start: int = 1, times: int = 3) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the vectors of each layer, for a pass of two sequences."""
    draw = torch.Generator().manual_seed(seed)
    length = start + times * PERIOD
    for _ in range(SHAPE.layers):
        yield (
            torch.randn(2, 3, 2, length, 8, generator=draw) * 2,
            torch.randn(2, 3, length, 8, generator=draw),
            torch.randn(2, 3, length, 5, generator=draw),
        )


def feed(found: HeadsCalibration, seed: int, start: int = 1) -> None:
    for layer, vectors in enumerate(passes(seed, start)):
        found.see(layer, *vectors)


def by_hand(layer: int, seed: int, start: int) -> dict[str, list[float]]:
    """Return the scores of a layer's heads, token by token in float64."""
    query, key, value = (x.double() for x in list(passes(seed, start))[layer])
    length = key.shape[2]
    counted = range(start + PERIOD, length)
    shares: dict[str, list[list[float]]] = {"induction": [], "echo": []}
    error, output = [0.0] * 3, 0.0
    for h in range(3):
        each: dict[str, list[float]] = {"induction": [], "echo": []}
        for g in range(2):
            total = dict.fromkeys(each, 0.0)
            for b in range(2):
                logit = query[b, h, g] @ key[b, h].mT / 8**0.5
                for i in counted:
                    weight = logit[i, : i + 1].softmax(0)
                    for t in range(start, i):
                        if (i - t) % PERIOD == 0:
                            total["echo"] += weight[t].item()
                            total["induction"] += weight[t + 1].item()
                    seen = [t for t in range(i + 1) if t < SINKS or t > i - PERIOD // 2]
                    ends = logit[i, seen].softmax(0) @ value[b, h, seen]
                    full = weight @ value[b, h, : i + 1]
                    error[h] += (ends - full).square().sum().item()
                    output += full.square().sum().item()
            for kind, sums in total.items():
                each[kind].append(sums / (2 * len(counted)))
        for kind, sums in each.items():
            shares[kind].append(sums)
    found = {kind: [max(group) for group in heads] for kind, heads in shares.items()}
    return {**found, "loss": [e / output for e in error]}


@pytest.mark.parametrize("start", [0, 1, 3])
def test_scores_are_those_of_the_definition(start: int) -> None:
    found = HeadsCalibration(SHAPE, PERIOD)
    feed(found, 5, start)
    assert found.tokens == 2 * (start + 3 * PERIOD)
    scores = found.scores()
    for layer in range(2):
        for kind, heads in by_hand(layer, 5, start).items():
            assert scores[kind][layer].tolist() == pytest.approx(heads, rel=1e-4)


def test_a_head_that_looks_up_the_next_token_has_the_highest_induction_score() -> None:
    found = HeadsCalibration(CacheShape(1, 2, 1, 64, 4), PERIOD)
    length = 3 * PERIOD
    place = torch.arange(length) % PERIOD
    codes = torch.eye(64)[:PERIOD] * 60
    after, same = codes[(place + 1) % PERIOD], codes[place]
    query = torch.stack([after, same])[None, :, None]
    key = torch.stack([same, same])[None]
    value = torch.randn(1, 2, length, 4, generator=torch.Generator().manual_seed(0))
    found.see(0, query, key, value)
    scores = found.scores()
    # A token attends to itself as well as to its earlier occurrences.
    assert scores["induction"][0].tolist() == pytest.approx([1, 0], abs=0.03)
    assert scores["echo"][0, 0].item() == pytest.approx(0, abs=1e-3)
    assert 0.4 < scores["echo"][0, 1].item() < 0.7
    assert scores["loss"][0].min() > 0.05


def test_going_on_from_a_state_gives_the_same_bits() -> None:
    whole, first = HeadsCalibration(SHAPE, PERIOD), HeadsCalibration(SHAPE, PERIOD)
    feed(whole, 1)
    feed(first, 1)
    second = HeadsCalibration(SHAPE, PERIOD)
    second.restore(first.state())
    feed(whole, 2)
    feed(second, 2)
    assert second.tokens == whole.tokens
    assert all(torch.equal(x, second.state()[name]) for name, x in whole.state().items())
    feed(first, 3)  # a state that was taken does not change
    assert second.tokens == whole.tokens


def test_a_state_of_another_model_is_refused() -> None:
    other = HeadsCalibration(CacheShape(2, 4, 2, 8, 5), PERIOD)
    with pytest.raises(ValueError, match="other sizes; start over"):
        HeadsCalibration(SHAPE, PERIOD).restore(other.state())


def test_the_file_has_scores_and_facts(tmp_path: Path) -> None:
    found = HeadsCalibration(SHAPE, PERIOD)
    feed(found, 1)
    found.write(tmp_path / "heads", Calibrated("tiny", "abc", "random", "0123"))
    there = load("duo", str(tmp_path / "heads"))
    assert (there.facts.model, there.facts.fingerprint, there.facts.text) == (
        "tiny",
        "abc",
        "random",
    )
    assert (there.facts.period, there.facts.tokens) == (PERIOD, found.tokens)
    assert torch.equal(there.scores["loss"], found.scores()["loss"])


def test_what_cannot_be_scored_is_refused() -> None:
    with pytest.raises(ValueError, match="a period of 9 tokens was given; use at least 16"):
        HeadsCalibration(SHAPE, 9)
    found = HeadsCalibration(SHAPE, PERIOD)
    with pytest.raises(ValueError, match="feed all layers the same tokens first"):
        found.scores()
    query, key, value = next(passes(0))
    with pytest.raises(ValueError, match="less than two periods of 17"):
        found.see(0, query[:, :, :, :30], key[:, :, :30], value[:, :, :30])
    there = torch.ones(2, key.shape[2], dtype=torch.bool)
    found.see(0, query, key, value, there)
    there[0, 0] = False
    with pytest.raises(ValueError, match="has no padding"):
        found.see(0, query, key, value, there)
    with pytest.raises(ValueError, match="from 0 to"):
        found.scores()
    value[0, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="an infinity or NaN"):
        found.see(1, query, key, value)
