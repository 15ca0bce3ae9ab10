"""The probabilities of a native pass, summed with it, against float64 for each instruction set."""

import os
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_cases import Case, random_case
from attention_judge import SHAPES
from kv_attention import Attended
from kv_cpu import arguments, attention_mass, prompt
from kv_cpu.few import MOST
from kv_cpu.library import FORCE
from kv_policy import Observe
from native_sets import PROMPT_SETS, kept_error

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAMES = st.sampled_from(["8", "4", "3", "1", "4n", "float16", "bfloat16", "float32"])
TIERS = st.lists(st.tuples(NAMES, NAMES), max_size=2)
LENGTHS = st.sampled_from([MOST + 1, 31, 33, 150])
WATCHED = [
    Observe(None, how, power, skip)
    for how in ("sum", "mean", "max-of-sums")
    for power, skip in ((1, 0), (1, 1), (2, 0))
]


@pytest.fixture(scope="module", params=[name for name in PROMPT_SETS if name != "plain"])
def isa(request):
    """Force each instruction set that attends to prompts."""
    with patch.dict(os.environ, {FORCE: request.param}):
        yield request.param


def summed(case: Case, what: Observe, threads: int = 1) -> Attended:
    """Attend and sum at once, which must not need a pass of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with patch.object(torch.ops.kv_cpu, "attention_mass", side_effect=AssertionError("twice")):
            return case.attend(what, backend="cpu")
    finally:
        torch.set_num_threads(before)


def assert_summed(case: Case, what: Observe, threads: int = 1) -> Attended:
    found = summed(case, what, threads)
    exact = replace(case, q=case.q.double()).attend(what, backend="reference")
    for got, wanted in zip(found.mass, exact.mass, strict=True):
        assert got.dtype == torch.float32
        near = 2e-5 + kept_error(case.q.dtype, what.power)
        torch.testing.assert_close(got.double(), wanted.double(), rtol=near, atol=2e-5)
    for got, wanted in zip(found.seen, exact.seen, strict=True):
        assert torch.equal(got, wanted)
    alone = prompt.attend_to_all(case.inputs())
    if torch.get_num_threads() == threads:  # another split into tasks rounds in another order
        assert torch.equal(found.out, alone.out)
    return found


@settings(max_examples=40)
@given(
    st.integers(0, 99), st.sampled_from(WATCHED), SHAPES, LENGTHS, st.sampled_from(DTYPES), TIERS
)
def test_any_pass(case, isa, seed, what, shape, length, dtype, tiers):
    assert_summed(case(seed, tiers=tiers, **shape | {"L": length, "dtype": dtype}), what)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", WATCHED, ids=lambda what: f"{what.group}-{what.power}-{what.skip}")
@pytest.mark.grid(3)
def test_tasks_of_many_blocks(case, isa, dtype, what):
    """Blocks and tiles are full and not, and a token's queries are in several tasks."""
    shape = {"B": 2, "H": 1, "G": 3, "L": 601, "D": 64, "Dv": 32, "stored": 300, "page": 16}
    c = case(1, tiers=[("8", "4"), ("bfloat16", "bfloat16")], padding="left", dtype=dtype, **shape)
    found = assert_summed(c, what, threads=3)
    for _ in range(3):  # workers finish in any order
        again = summed(c, what, threads=3)
        assert all(torch.equal(a, b) for a, b in zip(found.mass, again.mass, strict=True))


@pytest.mark.parametrize("group", [1, 2, 5, 13, 97])
@pytest.mark.parametrize("how", ["mean", "max-of-sums"])
@pytest.mark.grid(3)
def test_query_groups(case, isa, group, how):
    c = case(3, B=1, H=2, G=group, L=21, D=8, Dv=8, tiers=[("8", "4")], window=4)
    assert_summed(c, Observe(None, how, skip=1))


@pytest.mark.parametrize("change", [{"softcap": 2.0}, {"sinks": True}, {"holes": True}])
def test_logits_with_a_bound_or_sinks_and_pages_with_holes(case, isa, change):
    for dtype in DTYPES:
        shape = {"L": 70, "G": 3, "window": 4, "dtype": dtype, **change}
        assert_summed(case(4, tiers=[("8", "4")], **shape), Observe(None, "max-of-sums", skip=1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_query_and_queries_in_any_order(case, isa, dtype):
    c = case(5, B=2, L=40, G=2, dtype=dtype)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    shuffled = replace(c, q=c.q[..., order, :], position=c.position[:, order])
    for what in WATCHED:
        assert_summed(shuffled, what)
        nobody = summed(replace(c, position=torch.full_like(c.position, -1)), what)
        assert all((x == 0).all() for x in (*nobody.mass, *nobody.seen))


@pytest.mark.parametrize("name", PROMPT_SETS)
def test_small_probabilities_are_as_accurate(case, name):
    """Weights of down to 2**-29 of the largest, of queries that all see it."""
    c = case(9, tiers=[], B=1, H=1, G=2, L=64, D=8, Dv=8)
    c.q.copy_(torch.ones(8))
    c.dense[0].key.copy_((torch.linspace(0, -20, 64) / (8 * c.scale))[:, None])
    what = Observe(None, "sum")
    (found,) = prompt.attend_and_sum(c.inputs(), what, name)[1].mass
    (exact,) = replace(c, q=c.q.double()).attend(what, backend="reference").mass
    near = 2e-5 + kept_error(c.q.dtype, what.power)
    torch.testing.assert_close(found.double(), exact.double(), rtol=near, atol=0)


def test_a_nan_spoils_the_sums_of_what_its_query_sees(case, isa):
    for dtype in DTYPES:
        c = case(6, B=1, H=1, G=1, L=40, window=0, dtype=dtype)
        c.q[0, 0, 0, 30] = torch.nan
        *_, mass = summed(c, Observe(None, "sum")).mass
        assert mass[0, 0, :31].isnan().all()


def test_other_observations_have_a_pass_of_their_own(case):
    c = random_case(7, L=40, G=2, window=4)
    for what in (
        Observe(39),
        Observe(None, "max"),
        Observe(None, above=1.0),
        Observe(None, skip=2),
        Observe(None, also=frozenset({"entropy"})),
        Observe(None, "sum", gumbel=1.0),
    ):
        assert not prompt.sums(c.inputs(), what)
    assert prompt.sums(c.inputs(), Observe(40))
    both = [Observe(None, "sum"), Observe(None, "mean")]  # the first is summed with the pass
    found = c.attend(both[0], others=both[1:], backend="cpu")
    for got, (wanted,) in zip(
        found.others, [attention_mass.observe_all(forward_of(c), both[1:])], strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(got.mass, wanted.mass, strict=True))


def forward_of(c: Case):
    return prompt.attend_and_sum(c.inputs(), Observe(None, "sum"))[0]


def test_watches_that_a_pass_cannot_sum_are_errors(case):
    c = random_case(8, L=20, tiers=[], D=8, Dv=8)
    parts = arguments.parts(c.inputs(), watched=True)
    for watch, scored, reason in (
        ([2, 0, 1, 0], 0, "not one sum of probabilities"),
        ([0, 0, 1, 3], 0, "not one sum of probabilities"),
        ([0, 0, 2, 0, 1], 0, "the watch has 2 terms"),
        ([0, 2, 1, 0], 0, "skip of the watch is 2"),
        ([0, 0, 1], 0, "watch 0 is truncated"),
        ([0, 0, 1, 0], 1, "at most one of them"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            torch.ops.kv_cpu.prompt(
                c.q, c.position, *parts, watch, scored, 8, 0.3, 0.0, [], "plain"
            )
