"""Attention mass, compared with the reference and with the laws of probabilities."""

from dataclasses import replace
from itertools import product
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_judge import OBSERVE, WATCHED_SHAPES, assert_same_observation
from kv_attention import attend
from kv_attention.gumbel import noise
from kv_policy import Observe


@settings(max_examples=80)
@given(
    st.integers(0, 99),
    OBSERVE,
    WATCHED_SHAPES,
    st.lists(st.sampled_from([("8", "4"), ("4", "2"), ("float32", "float32")]), max_size=2),
)
@pytest.mark.parametrize("room", [1 << 19, 50])
def test_any_observation(case, room, seed, observe, shape, tiers):
    with patch("kv_attention.parts.ROOM", room):
        assert_same_observation(case(seed, tiers=tiers, **shape), observe)


ALL = list(product([None, 3], ["sum", "mean", "max", "max-of-sums"], [1, 2], [0, 2]))


@pytest.mark.parametrize(("last", "group", "power", "skip"), ALL)
def test_every_combination(case, last, group, power, skip):
    c = case(1, B=3, L=6, G=3, padding="left", window=4, dtype=torch.float64)
    assert_same_observation(c, Observe(last, group, power, skip), error=1e-12)


@pytest.mark.parametrize("group", ["sum", "mean", "max", "max-of-sums"])
@pytest.mark.parametrize("above", [0.5, 1.0, 2.0])
def test_counting_what_is_above_an_even_share(case, group, above):
    c = case(3, B=3, L=9, G=3, padding="left", window=4, dtype=torch.float64)
    found = assert_same_observation(c, Observe(5, group, above=above), error=1e-12)
    assert any(bool((m > 0).any()) for m in found.mass)
    assert all(torch.equal(m * 3, (m * 3).round()) for m in found.mass)  # thirds, of a mean of 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_attention_under_gumbel_noise(case, temperature, padding):
    c = case(5, B=3, L=9, G=3, padding=padding, window=4, dtype=torch.float64)
    observe = Observe(None, "sum", gumbel=temperature)
    found = assert_same_observation(c, observe, error=1e-10)
    total = torch.cat(found.mass, dim=-1).sum(dim=-1)
    real = (c.position >= 0).sum(dim=1)[:, None].double()
    torch.testing.assert_close(total, (3 * real).expand_as(total))
    plain = torch.cat(c.attend(Observe(None, "sum")).mass, dim=-1)
    assert not torch.allclose(torch.cat(found.mass, dim=-1), plain, atol=1e-2)


def test_gumbel_noise_has_the_distribution_it_is_named_for():
    place = torch.arange(400)
    drawn = noise(place[:, None], place[None])
    assert abs(float(drawn.mean()) - 0.5772) < 0.02
    assert abs(float(drawn.var()) - torch.pi**2 / 6) < 0.05
    assert torch.equal(drawn, noise(place[:, None], place[None]))


def test_several_observations_of_one_pass_are_those_of_a_pass_each(case):
    c = case(4, B=2, L=7, G=3, padding="left", window=4)
    several = [Observe(3), Observe(None, "sum", 2, also=frozenset({"squares"})), Observe(0)]
    together = c.attend(several[0], others=several[1:])
    assert len(together.others) == 2
    for observe, found in zip(several, (together, *together.others), strict=True):
        alone = c.attend(observe)
        assert torch.equal(found.out, alone.out)
        for got, wanted in zip(found.mass, alone.mass, strict=True):
            assert torch.equal(got, wanted)
        for got, wanted in zip(found.seen, alone.seen, strict=True):
            assert torch.equal(got, wanted)
    slow = c.attend(several[0], others=several[1:], backend="reference")
    torch.testing.assert_close(slow.others[0].mass, together.others[0].mass, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_the_attention_of_a_query_sums_to_one(case, padding):
    c = case(2, B=3, L=11, G=4, padding=padding, tiers=[("8", "4"), ("2", "2")], window=4)
    found = c.attend(Observe(None, "sum"))
    total = torch.cat(found.mass, dim=-1).sum(dim=-1)
    real = (c.position >= 0).sum(dim=1)[:, None]
    torch.testing.assert_close(total, (real * 4.0).expand(3, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_last_counts_the_real_queries_of_each_sequence(case, padding):
    c = case(3, B=3, L=9, padding=padding, tiers=[("8", "8")], window=3)
    real = (c.position >= 0).sum(dim=1)
    assert len(real.unique()) > 1
    found = c.attend(Observe(5))
    stored = torch.arange(found.seen[0].shape[-1]) < c.pages[0].length[..., None]
    assert torch.equal(found.seen[0], (real.clamp(max=5)[:, None, None] * stored).int())
    # Of the real queries i = 0 .. n - 1, those from i on see token i, at most the last 5.
    n, i = real[:, None], c.position - c.position.where(c.position >= 0, 10**9).amin(1, True)
    own = (n - i).clamp(max=5).where(c.position >= 0, 0)
    assert torch.equal(found.seen[-1], own[:, None].expand(-1, 2, -1).int())


def test_skipped_queries_do_not_count(case):
    c = case(4, B=1, L=6, tiers=[], dtype=torch.float64)
    everything = c.attend(Observe(None)).mass[0]
    near = c.attend(Observe(None, skip=2))
    assert near.seen[0][0, 0].tolist() == [4, 3, 2, 1, 0, 0]
    assert (near.mass[0][0, :, 4:] == 0).all()
    assert (near.mass[0] <= everything).all()


def test_power_and_group_do_what_they_say(case):
    c = case(5, B=1, L=1, G=3, tiers=[], window=6, dtype=torch.float64)

    def mass(group, power):
        return torch.cat(c.attend(Observe(1, group, power)).mass, dim=-1)

    torch.testing.assert_close(mass("sum", 1), mass("mean", 1) * 3)
    torch.testing.assert_close(mass("sum", 2), mass("mean", 2) * 3)
    torch.testing.assert_close(mass("max", 2), mass("max", 1) ** 2)
    assert (mass("max", 1) <= mass("sum", 1)).all()
    torch.testing.assert_close(mass("max-of-sums", 2), mass("max", 2))  # of one query


def test_the_largest_sum_is_not_the_sum_of_the_largest(case):
    c = case(8, B=1, L=9, G=3, tiers=[("8", "4")], window=6, dtype=torch.float64)
    each = [replace(c, q=c.q[:, :, g : g + 1]).attend(Observe(None)).mass for g in range(3)]
    sums = [torch.stack(masses).amax(0) for masses in zip(*each, strict=True)]
    for found, expected in zip(c.attend(Observe(None, "max-of-sums")).mass, sums, strict=True):
        torch.testing.assert_close(found, expected)
    assert (c.attend(Observe(None, "max")).mass[-1] > sums[-1] + 1e-3).any()


def test_every_stored_token_is_at_least_one_before_a_query(case):
    c = case(9, L=4, tiers=[("8", "4")], window=6)
    without = attend(c.q, c.position, c.pages, c.dense, c.scale, Observe(None, skip=1))
    found = c.attend(Observe(None, skip=1))
    assert all(torch.equal(a, b) for a, b in zip(found.mass, without.mass, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found.seen, without.seen, strict=True))


def test_nothing_is_observed_unless_asked(case):
    c = case(6)
    for observe in (Observe(), Observe(generated=True)):
        found = c.attend(observe)
        assert found.mass == found.seen == ()


def test_observing_does_not_change_the_output(case):
    c = case(7, L=20, tiers=[("8", "4")], window=4)
    assert torch.equal(c.attend().out, c.attend(Observe(None, "max", 2, 1)).out)
