"""Accumulated statistics equal those of all tokens at once."""

from pathlib import Path

import pytest
import torch

from kv_policy import CacheShape, Calibrated, Calibrator, load_calibrator
from kv_svd import Calibration, Moments, load, rotation

FACTS = Calibrated(model="m", fingerprint="f", text="t", digest="d")


@pytest.mark.parametrize("together", [1, 2, 4])
def test_singular_values_are_those_of_the_stacked_rows(made, together: int) -> None:
    found = made.calibration(together).statistics()
    for i, layer in enumerate(found):
        pairs = (rotation(layer.query + layer.keys), rotation(layer.values + layer.output))
        for rows, ours, kept in zip(
            made.stacked(i), pairs, (found.key[i], found.value[i]), strict=True
        ):
            _, singular, right = torch.linalg.svd(rows, full_matrices=False)
            torch.testing.assert_close(kept, singular, rtol=1e-8, atol=0)
            overlap = (ours.matrix.mT @ right.mT).abs()
            eye = torch.eye(rows.shape[-1], dtype=torch.float64).expand_as(overlap)
            torch.testing.assert_close(overlap, eye, rtol=0, atol=1e-6)


def test_heads_side_by_side_hold_each_heads_own_moments(made) -> None:
    one, two = (made.calibration(t).statistics() for t in (1, 2))
    for alone, joined in zip(one, two, strict=True):
        assert joined.together == 2
        assert joined.key.total.shape == (2, 128, 128)
        for name in ("keys", "values", "query", "output"):
            ours, theirs = getattr(joined, name), getattr(alone, name)
            assert ours.rows == theirs.rows
            torch.testing.assert_close(ours.total, theirs.total, rtol=1e-12, atol=1e-12)
    k = made.key[0].transpose(0, 1).flatten(1, 2)
    torch.testing.assert_close(two.layers[0].key.total[1, :64, 64:], k[2].mT @ k[3])


def test_order_and_batches_make_no_difference(made) -> None:
    whole = made.calibration(2).statistics()
    apart = made.calibration(2, read=False)
    for layer in (1, 0):
        for piece in (slice(40, 90), slice(0, 13), slice(13, 40)):
            for b in (1, 0):
                q, k, v = (
                    x[layer][b : b + 1, ..., piece, :] for x in (made.query, made.key, made.value)
                )
                apart.see(layer, q, k, v)
    assert apart.tokens == 180
    found = apart.statistics()
    for ours, theirs in zip(found, whole, strict=True):
        for name in ("query", "key", "value", "output"):
            one, other = getattr(ours, name), getattr(theirs, name)
            assert one.rows == other.rows
            torch.testing.assert_close(one.total, other.total, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.key, whole.key, rtol=1e-9, atol=0)


def test_padding_is_left_out(made) -> None:
    there = torch.arange(90) >= torch.tensor([[0], [31]])
    q, k, v = made.query[0].clone(), made.key[0].clone(), made.value[0].clone()
    q[1, :, :, :31] = k[1, :, :31] = v[1, :, :31] = torch.nan
    ours, theirs = (made.calibration(2, read=False) for _ in range(2))
    ours.see(0, q, k, v, there)
    theirs.see(0, q[:1], k[:1], v[:1])
    theirs.see(0, q[1:, :, :, 31:], k[1:, :, 31:], v[1:, :, 31:])
    for name, tensor in ours.state().items():
        torch.testing.assert_close(tensor, theirs.state()[name], rtol=1e-12, atol=1e-12)
    assert ours.state()["tokens"].tolist() == [149, 0]


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_what_is_not_finite_is_refused_and_not_added(made, name: str) -> None:
    found = made.calibration()
    before = found.state()
    vectors = {n: getattr(made, n)[1].clone() for n in ("query", "key", "value")}
    vectors[name].view(-1)[17] = torch.inf
    with pytest.raises(ValueError, match=f"layer 1: the {name} vectors contain an infinity or NaN"):
        found.see(1, **vectors)
    for key, tensor in found.state().items():
        assert torch.equal(tensor, before[key])


def test_going_on_gives_the_same_bits(made, tmp_path: Path) -> None:
    whole, first, second = (made.calibration(2, read=False) for _ in range(3))
    halves = (slice(0, 37), slice(37, 90))

    def read(calibration: Calibration, piece: slice) -> None:
        for i in range(made.shape.layers):
            q, k, v = (x[i][..., piece, :] for x in (made.query, made.key, made.value))
            calibration.see(i, q, k, v)

    for piece in halves:
        read(whole, piece)
    read(first, halves[0])
    second.restore(first.state())
    assert second.tokens == 74
    read(second, halves[1])
    whole.write(tmp_path / "whole", FACTS)
    second.write(tmp_path / "second", FACTS)
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "second").read_bytes()
    with pytest.raises(ValueError, match="of a model with other sizes"):
        made.calibration(1, read=False).restore(first.state())


def test_what_was_asked_for_before_is_not_what_is_known_later(made) -> None:
    early, late = made.calibration(), made.calibration()
    first = early.statistics()
    assert early.statistics() is first
    for calibration in (early, late):
        for i in range(made.shape.layers):
            calibration.see(i, made.query[i] * 2, made.key[i], made.value[i])
    assert early.statistics().tokens == 2 * first.tokens
    assert torch.equal(early.statistics().key, late.statistics().key)
    late.restore(made.calibration().state())
    assert torch.equal(late.statistics().key, first.key)


def test_what_is_held_does_not_grow(made) -> None:
    found = made.calibration(2)
    before = {name: tensor.shape for name, tensor in found.state().items()}
    found.see(0, made.query[0], made.key[0], made.value[0])
    assert {name: tensor.shape for name, tensor in found.state().items()} == before


def test_it_is_found_by_name_and_is_a_calibrator(made, tmp_path: Path) -> None:
    start = load_calibrator("zack")
    found = start(made.shape, made.output, together=2)
    assert isinstance(found, Calibrator)
    for i in range(2):
        found.see(i, made.query[i], made.key[i], made.value[i])
    found.write(tmp_path / "found", FACTS)
    assert load(tmp_path / "found")[0].together == 2
    with pytest.raises(ValueError, match=r"unknown calibration 'zick'; choose one of: .*zack"):
        load_calibrator("zick")


def test_dimensions_and_rates(made) -> None:
    found = made.calibration()
    few, many = found.dimensions(0.1), found.dimensions(0.01)
    assert few.keys() == {"Q-K", "V-O"}
    assert 1 <= few["Q-K"] < many["Q-K"] <= 64
    assert 1 <= few["V-O"] < many["V-O"] <= 32
    rates = found.rates(20)
    assert rates == tuple(sorted(set(rates)))
    assert 1 < len(rates) <= 20
    assert rates[-1] == 0.6666  # 16 of 64 and of 32 dimensions are left


def test_bad_input_is_refused(made) -> None:
    shape = made.shape
    with pytest.raises(ValueError, match="1 output projections were given for 2 layers"):
        Calibration(shape, made.output[:1])
    with pytest.raises(ValueError, match="has 300 columns; 4 KV heads of 32 dimensions need"):
        Calibration(shape, made.output[..., :300])
    with pytest.raises(ValueError, match="4 KV heads cannot be grouped by 3"):
        Calibration(shape, made.output, 3)
    broken = made.output.clone()
    broken[1, 3, 3] = torch.nan
    with pytest.raises(ValueError, match="projection of layer 1 contains an infinity or NaN"):
        Calibration(shape, broken)
    with pytest.raises(ValueError, match="without samples"):
        Calibration(shape, made.output).statistics()
    found = Calibration(shape, made.output)
    found.see(0, made.query[0], made.key[0], made.value[0])
    with pytest.raises(ValueError, match="layers have seen from 0 to 180 tokens"):
        found.statistics()
    assert found.tokens == 0
    with pytest.raises(ValueError, match=r"layer 0: .* cannot be added"):
        found.see(0, made.query[0][..., :32], made.key[0][..., :32], made.value[0])
    other = CacheShape(2, 4, 3, 64, 16)
    with pytest.raises(ValueError, match="rows of 10 numbers cannot be split into 3 equal pieces"):
        Moments(torch.zeros(1, 10, 10, dtype=torch.float64), 0).blocks(3)
    assert Calibration(other, made.output).tokens == 0  # twice as many query heads fit as well
