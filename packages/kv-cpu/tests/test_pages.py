"""Native page kernels, compared with those in torch: every byte of every page is the same."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kv_cpu import pages as native
from kv_paging import Recoding, Tiers, torch_kernels
from kv_policy import PagedTokens, PageLayout, RawCodec, RunningMean, RunningSum, TokenFormat
from kv_quant import CodebookCodec, IntegerCodec
from kv_quant.codebook import LEVELS
from page_cases import DIMS, FORMATS, codecs, one_store
from page_twins import DTYPES, Twins, strided, vectors

LAWS = settings(max_examples=30, deadline=None, derandomize=True)
BOTH = frozenset({"keys", "values"})


def same(found: list[object]) -> None:
    first, second = found
    for name in ("held", "score", "position", "key", "value"):
        a, b = getattr(first, name), getattr(second, name)
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b)), name


@LAWS
@given(
    form=FORMATS,
    tokens=st.integers(1, 9),
    beside=st.tuples(st.booleans(), st.booleans()),
    dtype=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    way=st.integers(0, 3),
    seed=st.integers(0, 999),
)
def test_appending_replacing_reading_and_compacting(isa, form, tokens, beside, dtype, way, seed):
    g = torch.Generator().manual_seed(seed)
    both = one_store(PageLayout.sized(form, tokens, *beside))
    every = torch.arange(3)
    coded = [isinstance(codec, IntegerCodec | CodebookCodec) for codec in (form.key, form.value)]

    def drawn(*shape: int) -> list[Tensor | None]:
        dims = (form.key.dim, form.value.dim)
        made = [
            vectors(g, *shape, dim, strange=strange).to(kind)
            for dim, kind, strange in zip(dims, dtype, coded, strict=True)
        ]
        return [
            *made,
            torch.randn(shape, generator=g) if beside[0] else None,
            torch.randint(0, 99, shape, generator=g).int() if beside[1] else None,
        ]

    for length in (7, 0, 1, 12):
        key, value, score, position = drawn(3, length)
        keep = torch.rand(3, length, generator=g) < 0.7
        both.do("append", every, strided(key, way), strided(value, way), keep, score, position)
        both.check()
    named = torch.tensor([2, 0])
    slot = torch.tensor([-1, 1])
    both.do("replace", named, slot, *drawn(2))
    both.check()
    same(both.do("read", torch.tensor([1, 0]), BOTH))
    same(both.do("read_layer", 0))
    start = torch.tensor([0, 2, 9])
    whole = both.each[0].whole()
    same([k.read(whole, every.flip(0), 4, BOTH, start) for k in (torch_kernels, native)])
    if beside[0]:
        for until in (None, torch.tensor([0, 30, 99])) if beside[1] else (None,):
            (a, b), (c, d) = both.do("weakest_all", until)
            assert torch.equal(a, c)
            assert torch.equal(b, d)
        longest = both.each[1].longest
        both.do("set_layer_scores", 0, torch.randn(3, longest + 1, generator=g).double())
        both.check()
        both.do("set_scores", named, torch.randn(2, longest, generator=g))
        both.check()
    if all(beside):
        mass = torch.rand(3, longest + 1, generator=g)
        seen = torch.randint(0, 4, mass.shape, generator=g)
        for running in (RunningMean(), RunningMean(0), RunningMean(5), RunningSum(7)):
            before = torch.tensor([100, -1, 3])
            both.do("accumulate_layers", slice(0, 1), before, mass, seen, running)
            both.check()
    both.do("compact", named, torch.rand(2, 30, generator=g) < 0.5)
    both.check()
    both.do("select", torch.tensor([2, 2, 0, 1, 0]))
    both.check()


PAIRS = st.tuples(DIMS, DIMS).flatmap(
    lambda dims: st.lists(
        st.builds(TokenFormat, codecs(dims[0]), codecs(dims[1])), min_size=2, max_size=2
    )
)


@LAWS
@given(
    forms=PAIRS,
    tokens=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    beside=st.tuples(st.booleans(), st.booleans()),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
)
def test_stored_tokens_are_encoded_in_another_format(isa, forms, tokens, beside, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    layouts = [
        PageLayout.sized(form, each, *beside) for form, each in zip(forms, tokens, strict=True)
    ]
    nbytes = max(layout.nbytes for layout in layouts)
    layouts = [replace(layout, nbytes=nbytes) for layout in layouts]
    both = Twins(lambda pool: Tiers(pool, layouts, 1, 3, 1), nbytes, "cpu")
    key, value = (
        vectors(
            g,
            3,
            21,
            each[0].dim,
            strange=all(isinstance(codec, IntegerCodec | CodebookCodec) for codec in each),
        ).to(dtype)
        for each in zip(*((form.key, form.value) for form in forms), strict=True)
    )
    score = torch.randn(3, 21, generator=g) if beside[0] else None
    place = torch.arange(21).expand(3, 21) if beside[1] else None
    keep = torch.rand(3, 21, generator=g) < 0.8
    both.do("append", 0, torch.arange(3), key, value, keep, score, place)
    both.do("append", 1, torch.arange(3), key, value, keep & (key[..., 0] > 0), score, place)
    named = torch.tensor([2, 0])
    marks = torch.rand(2, 30, generator=g) < 0.5
    for tiers in both.each:
        copied = tiers.stores[0].copied(named)
        assert copied[0].data.data_ptr() != tiers.pool.padded.data_ptr()
        tiers.append_stored(1, named, copied, marks)
    both.check()


@pytest.mark.parametrize("before", [8, 4, 3, 2, 1])
@pytest.mark.parametrize("after", [8, 4, 3, 2, 1])
@pytest.mark.parametrize("dim", [64, 128])
def test_whole_registers_of_codes_are_encoded_as_other_codes(isa, before, after, dim):
    """Also arbitrary bytes: scales that are negative, infinite or NaN, and large numbers."""
    g = torch.Generator().manual_seed(dim)
    forms = [
        TokenFormat(IntegerCodec(dim, bits), RawCodec(1, torch.float32)) for bits in (before, after)
    ]
    exact = [PageLayout.sized(*each) for each in zip(forms, (33, 20), strict=True)]
    nbytes = max(layout.nbytes for layout in exact)
    layouts = [replace(layout, nbytes=nbytes) for layout in exact]
    x, keep = vectors(g, 1, 300, dim, strange=True), torch.ones(1, 300, dtype=torch.bool)
    both = Twins(lambda pool: Tiers(pool, layouts, 1, 1, 1), nbytes, "cpu")
    both.do("append", 0, torch.arange(1), x, x[..., :1].nan_to_num(0), keep, None, None)
    wild = torch.randint(0, 256, both.pools[0].data.shape, generator=g).byte()
    pages = both.each[0].stores[0].pages()[4:].long()
    offset = layouts[0].segments[2][0]
    for pool, tiers in zip(both.pools, both.each, strict=True):
        pool.data[pages, :offset] = wild[pages, :offset]
        source = tiers.stores[0].copied(torch.arange(1))
        tiers.append_stored(1, torch.arange(1), source, keep)
    both.check()


def test_a_page_is_not_read_and_written(isa):
    form = TokenFormat(IntegerCodec(8, 4), IntegerCodec(8, 4))
    store = one_store(PageLayout.sized(form, 4)).each[1]
    keep = torch.ones(3, 6, dtype=torch.bool)
    store.append(torch.arange(3), *torch.randn(2, 3, 6, 8), keep)
    before = store.pool.data.clone()
    rows = torch.arange(3)
    tokens = Recoding(store.whole(), rows, rows, torch.zeros(3, dtype=torch.long), keep)
    with pytest.raises(RuntimeError, match=r"^page \d is read and written; tokens are encoded in"):
        native.recode(store.whole(), tokens)
    assert torch.equal(before, store.pool.data)


def test_a_source_may_have_more_pages_than_are_written_to(isa):
    form = TokenFormat(RawCodec(4, torch.float32), RawCodec(4, torch.float32))
    layout = PageLayout.sized(form, 4)
    data = torch.zeros(300, layout.nbytes, dtype=torch.uint8)
    data[298] = torch.randn(layout.nbytes // 4).view(torch.uint8)
    here, there = (torch.tensor([[[page]]], dtype=torch.int32) for page in (1, 298))
    length = torch.full((1, 1), 4, dtype=torch.int32)
    pages, source = (
        PagedTokens(data[:4], here, length, layout),
        PagedTokens(data, there, length, layout),
    )
    first = torch.zeros(1, dtype=torch.long)
    native.recode(pages, Recoding(source, first, first, first, torch.ones(1, 4, dtype=torch.bool)))
    assert torch.equal(data[1], data[298])


@pytest.mark.parametrize("bits", [8, 4, 3, 2, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.grid(3)
def test_whole_registers_of_numbers_near_the_middle_of_two_codes(isa, bits, dtype):
    """Quotients next to half a code, of every divisor, are rounded as a division rounds them."""
    g = torch.Generator().manual_seed(bits)
    halves = torch.arange(1, 0x7800).to(torch.int16).view(torch.float16).float()
    code = torch.randint(0, 2**bits - 1, (len(halves), 62), generator=g) + 0.5
    step = torch.randint(-2, 3, code.shape, generator=g)
    near = (code * halves[:, None]).view(torch.int32) + step.int()
    ends = torch.stack((torch.zeros_like(halves), halves * (2**bits - 1)), 1)
    x = torch.cat((ends, near.view(torch.float32)), 1)
    x = x[ends[:, 1] < 32752].to(dtype)[None]
    form = TokenFormat(IntegerCodec(64, bits), IntegerCodec(64, bits, 16))
    both = one_store(PageLayout.sized(form, 64), 1)
    both.do("append", torch.arange(1), x, x, torch.ones(x.shape[:2], dtype=torch.bool))
    both.check()


@pytest.mark.parametrize("bits", [8, 4, 3, 2, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.grid(3)
def test_scales_zeros_and_codes_of_many_pairs_of_numbers(isa, bits, dtype):
    """Pairs of numbers of any size, including every float16, cover every kind of rounding."""
    g = torch.Generator().manual_seed(bits)
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).float()
    beside = halves[torch.randperm(2**16, generator=g)]
    close = halves * (1 + torch.randint(-9, 10, halves.shape, generator=g) * 2**-22)
    wild = torch.randint(-(2**31), 2**31, (2, 2**16), generator=g).int().view(torch.float32)
    pairs = torch.cat([torch.stack(p, 1) for p in ((halves, beside), (halves, close), (*wild,))])
    third = pairs.float().nan_to_num(0).clamp(-4e4, 4e4).mean(1, keepdim=True)
    x = torch.cat((pairs, third), 1).to(dtype)[None]
    form = TokenFormat(IntegerCodec(3, bits), IntegerCodec(3, bits, 2))
    both = one_store(PageLayout.sized(form, 64), 1)
    both.do("append", torch.arange(1), x, x, torch.ones(x.shape[:2], dtype=torch.bool))
    both.check()


@pytest.mark.parametrize("bits", [4, 3, 2, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 61])
@pytest.mark.grid(3)
def test_numbers_at_the_bounds_between_levels(isa, bits, dtype, dim):
    """Vectors whose scale is any float16, and their numbers within a few steps of a bound."""
    g = torch.Generator().manual_seed(bits)
    scales = torch.arange(1, 0x7800).to(torch.int16).view(torch.float16).float()[::7]
    bounds = torch.tensor([(a + b) / 2 for a, b in pairwise(LEVELS[bits])])
    near = bounds[torch.randint(len(bounds), (len(scales), dim - 1), generator=g)]
    near *= (near.double().square().sum(1, keepdim=True) < dim).float()
    last = (dim - near.double().square().sum(1, keepdim=True)).sqrt().float()
    step = torch.randint(-3, 4, near.shape, generator=g)
    x = torch.cat((near * (1 + step * 2**-23) + step * 1e-30, last), 1) * scales[:, None]
    x = x[scales < 4096].to(dtype)[None]
    form = TokenFormat(CodebookCodec(dim, bits), CodebookCodec(dim, bits))
    both = one_store(PageLayout.sized(form, 64), 1)
    both.do("append", torch.arange(1), x, -x, torch.ones(x.shape[:2], dtype=torch.bool))
    both.check()


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_numbers_are_rounded_as_torch_does(isa, to, dtype):
    g = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (3, 40, 300), generator=g).int()
    bits[1] &= ~0x1FFF  # halves, and the midpoints between two
    bits[1] |= torch.randint(0, 3, (40, 300), generator=g).int() * 0x1000
    x = torch.cat((bits.view(torch.float32), vectors(g, 3, 5, 300)), 1).nan_to_num(0.0, 3e38, -3e38)
    x[0, :2, 0] = torch.tensor([torch.inf, -torch.inf])
    both = one_store(PageLayout.sized(TokenFormat(RawCodec(300, to), RawCodec(1, to)), 7))
    keep = torch.ones(3, 45, dtype=torch.bool)
    both.do("append", torch.arange(3), x.to(dtype), x[..., 1:2].to(dtype), keep)
    both.check()


@LAWS
@given(
    form=FORMATS,
    tokens=st.integers(1, 9),
    count=st.integers(0, 40),
    dtype=st.sampled_from(DTYPES),
    way=st.integers(0, 3),
    seed=st.integers(0, 999),
)
def test_tokens_at_any_places_of_memory_without_a_scratch_page(
    isa, form, tokens, count, dtype, way, seed
):
    g = torch.Generator().manual_seed(seed)
    layout = PageLayout.sized(form, tokens)
    heads = 1 + seed % 2
    pages = -(-count * heads // tokens) + 1
    place = torch.randperm(pages * tokens, generator=g)[: count * heads]
    if seed % 3:  # adjacent tokens of a head are in adjacent slots
        place = place.sort().values.view(heads, count).T.flatten()
    coded = [isinstance(codec, IntegerCodec | CodebookCodec) for codec in (form.key, form.value)]
    dims = (form.key.dim, form.value.dim)
    key, value = (
        strided(vectors(g, count, heads, dim, strange=strange).to(dtype), way)
        for dim, strange in zip(dims, coded, strict=True)
    )
    found = []
    for kernels in (native, torch_kernels):
        data = torch.full((pages, layout.nbytes), 0xFF, dtype=torch.uint8)
        kernels.place(data, layout, place // tokens, place % tokens, key, value)
        found.append(data)
    assert torch.equal(*found)


def test_nan_stays_nan(isa):
    x = torch.full((1, 3, 40), torch.nan)
    for to in DTYPES:
        store = one_store(PageLayout.sized(TokenFormat(RawCodec(40, to), RawCodec(40, to)), 2), 1)
        store.do("append", torch.arange(1), x, -x, torch.ones(1, 3, dtype=torch.bool))
        read = store.each[1].read_layer(0, BOTH)
        assert read.key.isnan().all()
        assert read.value.isnan().all()


def test_scores_that_are_infinite_or_nan_and_tokens_that_are_equal(isa):
    raw = RawCodec(1, torch.float32)
    both = one_store(PageLayout.sized(TokenFormat(raw, raw), 3, True, True), 6)
    inf, nan = torch.inf, torch.nan
    score = torch.tensor(
        [
            [3, 2, 2, 5],
            [inf, inf, inf, inf],
            [1, nan, 0, nan],
            [inf, 1, -inf, -inf],
            [0.0, -0.0, 1, 1],
            [1] * 4,
        ]
    )
    x, place = torch.zeros(6, 4, 1), torch.arange(4).expand(6, 4)
    keep = torch.ones(6, 4, dtype=torch.bool)
    keep[5] = False
    both.do("append", torch.arange(6), x, x, keep, score, place)
    for until in (None, torch.tensor([2, 0, 1, 4, 1, 2])):
        (a, b), (c, d) = both.do("weakest_all", until)
        assert torch.equal(a.nan_to_num(7), c.nan_to_num(7))
        assert torch.equal(b, d)


def test_a_store_that_holds_nothing(isa):
    both = one_store(
        PageLayout.sized(TokenFormat(IntegerCodec(4, 4), IntegerCodec(4, 4)), 3, True, True)
    )
    same(both.do("read_layer", 0, BOTH))
    (a, b), (c, d) = both.do("weakest_all")
    assert a.tolist() == c.tolist() == [torch.inf] * 3
    assert b.tolist() == d.tolist() == [-1] * 3
    both.do("set_layer_scores", 0, torch.zeros(3, 0))
    both.do("compact", torch.arange(3), torch.zeros(3, 0, dtype=torch.bool))
    both.check()


@pytest.mark.parametrize("threads", [1, 3])
def test_long_prompts_in_threads(isa, threads):
    g = torch.Generator().manual_seed(1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        both = one_store(
            PageLayout.sized(TokenFormat(IntegerCodec(16, 8), IntegerCodec(16, 4)), 13, True, True),
            5,
        )
        x = vectors(g, 5, 1300, 16, strange=True)
        place = torch.arange(1300).expand(5, 1300)
        keep = torch.rand(5, 1300, generator=g) < torch.tensor([1, 0.5, 0, 0.01, 0.99])[:, None]
        both.do(
            "append",
            torch.arange(5),
            x,
            x.bfloat16(),
            keep,
            torch.randn(5, 1300, generator=g),
            place,
        )
        both.check()
        both.do("compact", torch.arange(5), torch.rand(5, 1300, generator=g) < 0.5)
        both.check()
        same(both.do("read_layer", 0, BOTH))
    finally:
        torch.set_num_threads(before)
