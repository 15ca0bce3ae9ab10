"""The native attention-mass pass, compared with the reference, for each instruction set."""

from dataclasses import replace
from itertools import product
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_cases import Case, pack, random_case
from attention_judge import OBSERVE, WATCHED_SHAPES, assert_same_observation
from kv_attention import DenseTokens, torch_backend
from kv_cpu import arguments, attention_mass, chosen, prompt
from kv_cpu.few import MOST
from kv_policy import Observe, RawCodec
from native_sets import kept_error

DTYPES_OF_QUERIES = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = st.sampled_from(DTYPES_OF_QUERIES)
NAMES = ["8", "4", "3", "2", "1", "4n", "3n", "float16", "bfloat16", "float32"]
TIERS = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)), max_size=2)
LENGTHS = st.sampled_from([2, 31, 33, 150])
DIMS = st.sampled_from([1, 2, 17, 32])
GROUPS = ["sum", "mean", "max", "max-of-sums"]
EVERYTHING = frozenset({"squares", "entropy"})


@pytest.fixture(autouse=True)
def no_torch(near):
    """Allow torch's attention-mass pass only for what native code declines."""
    with patch("kv_cpu.attention_mass.attention_mass", side_effect=AssertionError("torch did it")):
        yield


def bound(dtype):
    """Return the tolerance: torch may compute the pass, whose 16-bit log-sum-exp is rounded."""
    return 2e-4 if chosen() == "plain" and dtype != torch.float32 else 2e-5


def kept(case, observe):
    """Return the error of sums that are found with the pass, whose weights are rounded."""
    alone = prompt.declined(case.inputs()) is not None or not prompt.sums(case.inputs(), observe)
    return 0 if alone else kept_error(case.q.dtype, observe.power)


@settings(max_examples=25)
@given(st.integers(0, 99), OBSERVE, WATCHED_SHAPES, DTYPES, LENGTHS, DIMS, TIERS)
def test_any_observation_of_a_prompt(case, near, seed, observe, shape, dtype, length, dim, tiers):
    shape = shape | {"L": length, "dtype": dtype, "D": dim, "Dv": dim}
    error = bound(dtype) if length > MOST else max(near, 2e-4)  # torch attends to plain tokens
    c = case(seed, tiers=tiers, **shape)
    assert_same_observation(c, observe, error + kept(c, observe), "cpu")


@pytest.mark.parametrize(("group", "power", "skip"), list(product(GROUPS, [1, 2], [0, 2, 70])))
@pytest.mark.grid(3)
def test_every_combination_in_three_threads(case, group, power, skip):
    tiers = [("8", "4"), ("bfloat16", "bfloat16")]
    shape = {"B": 2, "H": 1, "G": 3, "L": 70, "stored": 300, "page": 16, "padding": "left"}
    c = case(1, window=4, holes=True, tiers=tiers, **shape)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for last in (None, 40):
            observe = Observe(last, group, power, skip, also=EVERYTHING)
            assert_same_observation(c, observe, 2e-5, "cpu")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES_OF_QUERIES)
@pytest.mark.parametrize("dim", [1, 31, 64, 300])
@pytest.mark.parametrize("name", ["4", "bfloat16", "float32"])
@pytest.mark.grid(3)
def test_dimensions(case, dtype, dim, name):
    shape = {"D": dim, "Dv": dim, "L": 40, "stored": 40, "page": 16, "scale": dim**-0.5}
    c = case(2, tiers=[(name, name)], dtype=dtype, **shape)
    assert_same_observation(c, Observe(None, also=EVERYTHING), bound(dtype), "cpu")


@pytest.mark.parametrize("group", [1, 2, 7, 13, 97])
@pytest.mark.parametrize("how", GROUPS)
@pytest.mark.grid(3)
def test_query_groups(case, group, how):
    c = case(3, B=1, H=2, G=group, L=9, D=8, Dv=8, tiers=[("8", "4")], window=4)
    observe = Observe(None, how)
    assert_same_observation(c, observe, 2e-5 + kept(c, observe), "cpu")


@pytest.mark.parametrize("how", GROUPS)
@pytest.mark.parametrize("above", [0.5, 1.0, 2.0])
@pytest.mark.grid(3)
def test_counting_what_is_above_an_even_share(case, how, above):
    c = case(4, B=3, L=40, G=3, padding="left", window=4)
    found = assert_same_observation(c, Observe(30, how, above=above), 2e-5, "cpu")
    assert any(bool((m > 0).any()) for m in found.mass)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("dtype", DTYPES_OF_QUERIES)
def test_the_attention_of_a_query_sums_to_one(case, padding, dtype):
    c = case(5, B=3, L=120, G=4, padding=padding, window=4, tiers=[("8", "4")], dtype=dtype)
    total = torch.cat(c.attend(Observe(None, "sum"), backend="cpu").mass, dim=-1).sum(dim=-1)
    real = (c.position >= 0).sum(dim=1)[:, None]
    error = bound(dtype) + kept(c, Observe(None, "sum"))
    torch.testing.assert_close(total, (real * 4.0).expand(3, 2), rtol=error, atol=0)


@pytest.mark.parametrize("dtype", DTYPES_OF_QUERIES)
def test_two_chunks_observe_what_one_prompt_does(dtype):
    """The first chunk is in pages when the second one is computed."""
    g = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(2, 2, n, 140, 24, generator=g).to(dtype) for n in (3, 1, 1))
    k, v, place = k[:, :, 0], v[:, :, 0], torch.arange(140).expand(2, -1)
    observe, first = Observe(None, also=EVERYTHING), 90

    def observed(at, pages, positions):
        tokens = [DenseTokens(k[:, :, at], v[:, :, at], place[:, at])]
        c = Case(q[..., at, :], place[:, at], pages, tokens, positions)
        return c.attend(observe, backend="cpu")

    codec = RawCodec(24, dtype)
    length = torch.full((2, 2), first)
    pages = pack(k[:, :, :first], v[:, :, :first], length, (codec, codec), 7, 0)
    one = observed(slice(None), [], [])
    two = [observed(slice(first), [], []), observed(slice(first, None), [pages], [None])]
    assert torch.equal(one.seen[0][..., :first], two[0].seen[0] + two[1].seen[0])
    for of in (lambda x, i: x.mass[i], *(lambda x, i, n=n: x.also[i][n] for n in EVERYTHING)):
        sums = torch.cat([of(two[0], 0) + of(two[1], 0), of(two[1], 1)], dim=-1)
        torch.testing.assert_close(of(one, 0), sums, rtol=bound(dtype), atol=bound(dtype))


def test_several_observations_of_one_pass_are_those_of_a_pass_each(case):
    c = case(7, B=2, L=70, G=3, padding="left", window=4)
    several = [Observe(33), Observe(0), Observe(None, "sum", 2, also=frozenset({"squares"}))]
    several += [Observe(50, "max-of-sums", skip=5), Observe(2, "max", also=EVERYTHING)]
    together = c.attend(several[0], others=several[1:], backend="cpu")
    assert len(together.others) == 4
    for observe, found in zip(several, (together, *together.others), strict=True):
        alone = c.attend(observe, backend="cpu")
        assert torch.equal(found.out, alone.out)
        assert len(found.mass) == len(alone.mass) == (3 if observe.last != 0 else 0)
        for mine, theirs in ((found.mass, alone.mass), (found.seen, alone.seen)):
            # A pass of fewer queries groups them differently, which changes the order of sums.
            for a, b in zip(mine, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        for some, others in zip(found.also, alone.also, strict=True):
            assert set(some) == set(others) == observe.also


def test_gumbel_noise_beside_others_is_left_to_torch(case):
    c = case(8, L=20, window=4)
    noisy = Observe(None, "sum", gumbel=0.7)
    assert "Gumbel" in attention_mass.declined(c.inputs(), noisy)
    with patch("kv_cpu.attention_mass.attention_mass", torch_backend.attention_mass):
        found = c.attend(noisy, others=[Observe(3), noisy], backend="cpu")
    expected = c.attend(noisy, others=[Observe(3), noisy])
    for got, wanted in ((found, expected), *zip(found.others, expected.others, strict=True)):
        torch.testing.assert_close(got.mass, wanted.mass, rtol=2e-5, atol=2e-5)


def test_views_with_any_strides(case):
    c = case(9, B=2, L=40, G=2, D=8, Dv=8, tiers=[("8", "4")], window=6)
    expected = c.attend(Observe(None), backend="cpu").mass
    turned = c.q.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4)
    spread = torch.stack([turned] * 2, dim=-1)[..., 0]
    tokens = c.dense[1]
    key = tokens.key.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.full((2, tokens.key.shape[2] + 3), 7)
    wide[:, 1:-2] = tokens.position
    dense = [c.dense[0], DenseTokens(key, tokens.value, wide[:, 1:-2])]
    for q in (turned, spread):
        moved = replace(c, q=q, dense=dense).attend(Observe(None), backend="cpu").mass
        for a, b in zip(moved, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_queries_in_any_order_of_positions(case):
    c = case(10, B=2, L=50, padding="left", window=4)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    mixed = replace(c, q=c.q[..., order, :], position=c.position[:, order])
    assert_same_observation(mixed, Observe(None, skip=3), 2e-5, "cpu")


def test_queries_that_see_nothing(case):
    c = case(11, B=2, L=40, tiers=[("8", "4")], window=5)
    c.pages[0].length[0] = 0
    for tokens in c.dense:
        tokens.position[0] = -1
    assert_same_observation(c, Observe(None, "max", also=EVERYTHING), 2e-5, "cpu")


def test_no_tokens_at_all(case):
    c = case(12, L=5, tiers=[], fresh=False)
    assert c.attend(Observe(None), backend="cpu").mass == ()


def test_observing_does_not_change_the_output(case):
    c = case(13, L=70, tiers=[("8", "4")], window=4)
    watched = c.attend(Observe(None, "max", 2, 1), backend="cpu").out
    assert torch.equal(c.attend(backend="cpu").out, watched)


def observing(c, q=None, last=(5,)):
    """Run all but the last step, which reads the tables again."""
    done = torch_backend.forward(c.inputs())
    return lambda: torch.ops.kv_cpu.attention_mass(
        c.q if q is None else q,
        c.position,
        done.lse.contiguous(),
        *arguments.parts(c.inputs(), watched=True),
        *arguments.watches([Observe(5)]),
        list(last),
        8,
        c.scale,
        0.0,
        chosen(),
    )


@pytest.mark.parametrize("threads", [1, 3])
def test_a_page_outside_of_the_pool_is_an_error(threads):
    c = random_case(14, L=6, D=8, Dv=8, stored=300, page=16, tiers=[("8", "4"), ("4", "2")])
    observe = observing(c)
    observe()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        c.pages[1].table[1, 1, 0] = 10**6
        with pytest.raises(RuntimeError, match=r"pages\[1\] has page 1000000 in its table"):
            observe()
    finally:
        torch.set_num_threads(before)


def test_arguments_that_do_not_fit_are_errors():
    c = random_case(15, L=6, D=8, Dv=8)
    with pytest.raises(RuntimeError, match="last has 0 numbers for 1 watches; it needs one"):
        observing(c, last=())()
    with pytest.raises(RuntimeError, match=r"position is int64 .* it must be int64 \[\d+, 5\]"):
        observing(c, q=c.q[..., :5, :])()
