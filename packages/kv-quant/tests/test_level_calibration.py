"""Calibration of levels: what is accumulated, what levels lose, and resuming."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kv_policy import CacheShape, Calibrated, Codec
from kv_quant import LevelsCodec, OutlierCodec
from kv_quant.level_calibration import KINDS, Kind, LevelCalibration
from kv_quant.level_file import load
from kv_quant.sensitivity import sensitivity

SHAPE = CacheShape(layers=2, kv_heads=3, group=2, key_dim=8, value_dim=5)
FACTS = Calibrated("tiny", "abc", "sentences", "0123")


def passes(seed: int, length: int = 37) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the vectors of each layer, for a pass of two sequences."""
    draw = torch.Generator().manual_seed(seed)
    for layer in range(SHAPE.layers):
        key = torch.randn(2, 3, length, 8, generator=draw) + 0.4
        key[..., 3] *= 6
        yield (
            torch.randn(2, 3, 2, length, 8, generator=draw),
            key,
            torch.randn(2, 3, length, 5, generator=draw) * (1 + layer) + 0.2,
        )


def feed(found: LevelCalibration, seed: int, length: int = 37) -> None:
    for layer, vectors in enumerate(passes(seed, length)):
        found.see(layer, *vectors)


def by_hand(kind: Kind, outliers: int) -> tuple[Tensor, Tensor]:
    """Return the places of elements in the ranges of their vectors, and weights, in float64."""
    elements, weights = [], []
    for query, key, value in passes(5):
        found = sensitivity(query.double(), key.double(), value.double())
        x, weight = (key, found.key) if kind == "keys" else (value, found.value[..., None])
        weight = weight.expand(x.shape).reshape(-1, x.shape[-1])
        for vector, each in zip(x.reshape(-1, x.shape[-1]).double(), weight, strict=True):
            order = vector.argsort()
            keep = min(
                (order[i : len(order) - outliers + i] for i in range(outliers + 1)),
                key=lambda rest: float(vector[rest[-1]] - vector[rest[0]]),
            )
            low, span = vector[keep[0]], vector[keep[-1]] - vector[keep[0]]
            elements.append((vector[keep] - low) / span)
            weights.append(each[keep] * span.square() / found.output)
    return torch.cat(elements), torch.cat(weights)


@pytest.mark.parametrize("outliers", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_elements_and_weights_are_those_of_the_definition(kind: Kind, outliers: int) -> None:
    found = LevelCalibration(SHAPE, (outliers,))
    feed(found, 5)
    assert found.tokens == 2 * 37
    x, weight = by_hand(kind, outliers)
    sums = found.state()[kind][0]
    for power in range(3):
        exact = float((weight * x**power).sum())
        assert float(sums[power].sum()) == pytest.approx(exact, rel=5e-3)  # ranges are float16
    for bits in (4, 3, 2, 1):
        (fit,) = (each for each in found.fits() if each.bits == bits)
        steps = torch.tensor(fit.keys if kind == "keys" else fit.values, dtype=torch.float64)
        levels = steps / (2**bits - 1)
        lost = float((weight * (x[:, None] - levels).square().amin(1)).sum())
        (error,) = (each for each in found.errors() if each.bits == bits)
        assert getattr(error, kind) ** 2 == pytest.approx(lost / 2, rel=0.02)
        assert getattr(error, kind) < getattr(error, f"even_{kind}")


@pytest.mark.parametrize("outliers", [0, 1])
def test_the_estimate_is_near_the_error_of_attention(outliers: int) -> None:
    """Errors of single elements are taken as independent, which those of random vectors are."""
    found = LevelCalibration(SHAPE, (outliers,))
    feed(found, 1, 300)
    (fit,) = (each for each in found.fits() if each.bits == 4)
    (error,) = (each for each in found.errors() if each.bits == 4)
    lost = dict.fromkeys(KINDS, 0.0)
    for query, key, value in passes(1, 300):
        exact = attended(query, key, value)
        for kind, x, levels in (("keys", key, fit.keys), ("values", value, fit.values)):
            each: Codec = LevelsCodec(x.shape[-1], 4, levels)
            codec = OutlierCodec(each, outliers) if outliers else each
            back = codec.decode(codec.encode(x.reshape(-1, 1, x.shape[-1]))).reshape(x.shape)
            out = attended(query, *((back, value) if kind == "keys" else (key, back)))
            lost[kind] += float((out - exact).square().sum() / exact.square().sum()) / 2
    for kind in KINDS:
        assert getattr(error, kind) == pytest.approx(lost[kind] ** 0.5, rel=0.25)


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    logit = (query @ key[:, :, None].mT).double() * key.shape[-1] ** -0.5
    later = torch.ones(logit.shape[-2:], dtype=torch.bool).triu(1)
    return logit.masked_fill(later, -torch.inf).softmax(-1) @ value[:, :, None].double()


def test_going_on_from_a_state_gives_the_same_bits() -> None:
    whole, first = LevelCalibration(SHAPE), LevelCalibration(SHAPE)
    feed(whole, 1)
    feed(first, 1)
    second = LevelCalibration(SHAPE)
    second.restore(first.state())
    feed(whole, 2)
    feed(second, 2)
    assert second.tokens == whole.tokens == 4 * 37
    assert all(torch.equal(x, second.state()[name]) for name, x in whole.state().items())
    assert second.fits() == whole.fits()
    feed(first, 3)  # a state that was taken does not change
    assert second.tokens == whole.tokens


def test_a_state_of_something_else_is_refused() -> None:
    for other in (
        LevelCalibration(replace(SHAPE, layers=3)),
        LevelCalibration(SHAPE, (0, 1, 2)),
    ):
        with pytest.raises(ValueError, match="other sizes, or for other outliers; start over"):
            LevelCalibration(SHAPE).restore(other.state())


def test_the_file_has_levels_and_facts(tmp_path: Path) -> None:
    found = LevelCalibration(SHAPE, (0, 2))
    feed(found, 1)
    found.write(tmp_path / "levels.json", FACTS)
    there = load("k4v4", str(tmp_path / "levels.json"))
    assert (there.model, there.fingerprint, there.text, there.tokens) == (
        "tiny",
        "abc",
        "sentences",
        2 * 37,
    )
    assert [(f.bits, f.outliers) for f in there.fits] == [
        (bits, outliers) for outliers in (0, 2) for bits in (4, 3, 2, 1)
    ]
    assert there.fits == found.fits()
    for fit in there.fits:
        assert len(fit.keys) == len(fit.values) == 2**fit.bits
        assert all(a < b for each in (fit.keys, fit.values) for a, b in pairwise(each))


def test_what_cannot_be_fitted_is_refused() -> None:
    for wrong in ((), (-1,), (1, 1)):
        with pytest.raises(ValueError, match="give one or more different numbers of 0 or more"):
            LevelCalibration(SHAPE, wrong)
    latent = replace(SHAPE, value_in_key=True)
    with pytest.raises(ValueError, match="so use levels=even with this model"):
        LevelCalibration(latent)
    found = LevelCalibration(SHAPE)
    with pytest.raises(ValueError, match="feed all layers the same passes first"):
        found.fits()
    query, key, value = next(passes(0))
    there = torch.ones(2, key.shape[2], dtype=torch.bool)
    found.see(0, query, key, value, there)
    there[0, 0] = False
    with pytest.raises(ValueError, match="has no padding"):
        found.see(0, query, key, value, there)
    with pytest.raises(ValueError, match="from 0 to 1 passes"):
        found.errors()
    with pytest.raises(ValueError, match="or all values are 0"):
        found.see(1, query, key, torch.zeros_like(value))
    key[0, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="an infinity or NaN"):
        found.see(1, query, key, value)
