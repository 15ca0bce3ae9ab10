"""Native observations of a decode step, compared with the reference and the laws of attention."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_judge import OBSERVE, WATCHED_SHAPES, assert_same_observation
from kv_policy import Observe

TIERS = [("8", "4"), ("4", "2"), ("float32", "float32")]
STEPS = WATCHED_SHAPES.map(lambda shape: shape | {"L": 1})


@settings(max_examples=40)
@given(st.integers(0, 99), OBSERVE, STEPS, st.lists(st.sampled_from(TIERS), max_size=2))
def test_any_observation_of_a_decode_step(case, near, seed, observe, shape, tiers):
    assert_same_observation(case(seed, tiers=tiers, **shape), observe, near, "cpu")


@settings(max_examples=20)
@given(st.integers(0, 99), OBSERVE, WATCHED_SHAPES)
def test_any_observation(case, near, seed, observe, shape):
    assert_same_observation(case(seed, tiers=TIERS[:2], **shape), observe, near, "cpu")


GROUPS = ["sum", "mean", "max", "max-of-sums"]


COMBINATIONS = list(product(GROUPS, [1, 2], [0, 1, 2, 9]))


@pytest.mark.parametrize(("group", "power", "skip"), COMBINATIONS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.grid(3)
def test_every_combination_over_long_table_rows(case, near, group, power, skip, threads):
    shape = {"B": 2, "H": 1, "L": 1, "G": 3, "D": 32, "Dv": 32, "stored": 600, "page": 16}
    c = case(1, window=4, holes=True, tiers=TIERS, **shape)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        observe = Observe(1, group, power, skip, also=frozenset({"squares", "entropy"}))
        assert_same_observation(c, observe, near, "cpu")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("above", [0.5, 1.0, 2.0])
def test_counting_what_is_above_an_even_share(case, near, group, above):
    c = case(3, B=3, L=1, G=3, window=4)
    found = assert_same_observation(c, Observe(5, group, above=above), near, "cpu")
    assert any(bool((m > 0).any()) for m in found.mass)


def test_gumbel_noise_is_left_to_torch(case, near):
    observe = Observe(None, "sum", gumbel=0.7)
    assert_same_observation(case(5, L=1, window=4), observe, near, "cpu")


def test_several_observations_of_one_pass_are_those_of_a_pass_each(case, near):
    c = case(4, L=1, G=3, window=4)
    several = [Observe(3), Observe(None, "sum", 2, also=frozenset({"squares"})), Observe(0)]
    several.append(Observe(1, "max", skip=5))
    together = c.attend(several[0], others=several[1:], backend="cpu")
    assert len(together.others) == 3
    for observe, found in zip(several, (together, *together.others), strict=True):
        alone = c.attend(observe, backend="cpu")
        assert torch.equal(found.out, alone.out)
        assert len(found.mass) == len(alone.mass)
        for mine, theirs in ((found.mass, alone.mass), (found.seen, alone.seen)):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        assert [set(more) for more in found.also] == [set(more) for more in alone.also]


def test_the_attention_of_a_query_sums_to_one(case, near):
    c = case(2, B=3, L=1, G=4, tiers=[("8", "4"), ("2", "2")], window=4)
    total = torch.cat(c.attend(Observe(None, "sum"), backend="cpu").mass, dim=-1).sum(dim=-1)
    torch.testing.assert_close(total, torch.full((3, 2), 4.0), rtol=1e-4, atol=1e-4)


def test_observing_does_not_change_the_output(case, near):
    c = case(7, L=1, stored=700, page=16, tiers=[("8", "4")], window=4)
    watched = c.attend(Observe(None, "max", 2, 1), backend="cpu").out
    assert torch.equal(c.attend(backend="cpu").out, watched)
