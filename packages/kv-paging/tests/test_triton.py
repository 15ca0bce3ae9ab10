"""Triton's page kernels, compared with those in torch: every byte of every page is the same."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from kv_paging import PerHeadRankTiers, Tiers, fit, read_slots, torch_kernels, triton_kernels
from kv_paging.kernels import declined, select_page_kernels
from kv_policy import PageLayout, RawCodec, RunningMean, RunningSum, TokenFormat
from kv_policy.interpreter import SWITCH
from kv_quant import ChannelCodec
from kv_quant.integer import IntegerCodec
from page_twins import DTYPES, strided, vectors
from triton_cases import DEVICE, NAMED, Both, Program, form, one_store, same

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning"),
]
BOTH = frozenset({"keys", "values"})


# Keys, values, their dimensions, tokens of a page: each kind of number, whole vectors and groups
# that do and do not divide them, pages of odd, unaligned sizes.
FORMATS = [
    ("8", "4", 128, 128, 16),
    ("4", "2", 65, 33, 3),
    ("2/8", "1/5", 32, 7, 5),
    ("1", "8/4", 9, 12, 1),
    ("4/33", "8/130", 130, 130, 2),
    ("float16", "bfloat16", 5, 3, 4),
    ("float32", "4/1", 1, 6, 7),
    ("bfloat16", "float16", 64, 257, 2),
]


@pytest.mark.parametrize(("keys", "values", "key", "value", "tokens"), FORMATS)
def test_tokens_are_written_read_and_moved(keys, values, key, value, tokens) -> None:
    g = torch.Generator().manual_seed(key)
    what = form(keys, values, key, value)
    number = FORMATS.index((keys, values, key, value, tokens))
    scores, positions = number != 3, number != 4
    both = one_store(PageLayout.sized(what, tokens, scores, positions))
    dtypes = [DTYPES[number % 3], DTYPES[number // 3]]

    def drawn(*shape: int) -> list[Tensor | None]:
        made = [
            vectors(g, *shape, codec.dim, strange=isinstance(codec, IntegerCodec)).to(dtype)
            for codec, dtype in zip((what.key, what.value), dtypes, strict=True)
        ]
        return [
            *made,
            torch.randn(shape, generator=g) if scores else None,
            torch.randint(0, 99, shape, generator=g).int() if positions else None,
        ]

    for length in (7, 0, 40):
        key_, value_, *beside = drawn(3, length)
        keep = torch.rand(3, length, generator=g) < torch.tensor([0.7, 0, 1])[:, None]
        rows = (strided(key_, number % 3), strided(value_, 1))
        both.do("append", torch.arange(3), *rows, keep, *beside)
    named = torch.tensor([2, 0])
    both.do("replace", named, torch.tensor([-1, 1]), *drawn(2))
    both.do("read", torch.tensor([1, 0]), BOTH)
    both.do("read_layer", 0, frozenset({"values"}))
    if scores:
        both.do("weakest_all", torch.tensor([0, 30, 99]) if positions else None)
        longest = both.each[0].longest
        both.do("set_layer_scores", 0, torch.randn(3, longest + 1, generator=g).double())
        both.do("set_scores", named, torch.randn(2, longest, generator=g))
        both.do("weakest", named)
    if scores and positions:
        before, seen = torch.tensor([100, -1, 3]), torch.randint(0, 4, (3, longest), generator=g)
        mass = torch.rand(3, longest, generator=g)
        for running in (RunningMean(5), RunningSum(7)):
            both.do("accumulate_layers", slice(0, 1), before, mass, seen, running)
    if scores and not positions:  # those of a window are not in its pages
        before, place = torch.tensor([100, -1, 3]), torch.arange(longest).expand(3, longest) - 1
        mass = torch.rand(3, longest, generator=g)
        given = mass, torch.ones_like(mass).int(), RunningMean(5), place
        both.do("accumulate_layers", slice(0, 1), before, *given)
    some = torch.tensor([2, 0]), torch.tensor([[1], [39]])
    same(*(read_slots(one, *(x.to(one.pool.device) for x in some)) for one in both.each))
    both.do("compact", named, torch.rand(2, 50, generator=g) < 0.5)
    both.do("select", torch.tensor([2, 2, 0, 1, 0]))


@pytest.mark.parametrize(("bits", "part"), [((8, 4), 1), ((2, 1), 8)])
def test_scales_zeros_and_codes_of_many_pairs_of_numbers(bits, part) -> None:
    """Pairs of numbers of any size, including every float16, cover every kind of rounding."""
    g = torch.Generator().manual_seed(bits[0])
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).float()
    other = halves[torch.randperm(2**16, generator=g)]
    close = halves * (1 + torch.randint(-9, 10, halves.shape, generator=g) * 2**-22)
    wild = torch.randint(-(2**31), 2**31, (2, 2**16), generator=g).int().view(torch.float32)
    pairs = [(halves, other), (halves[1::4], close[1::4]), (*wild[:, 1::4],)]
    pairs = torch.cat([torch.stack(pair, 1) for pair in pairs])[::part]
    third = pairs.nan_to_num(0).clamp(-4e4, 4e4).mean(1, keepdim=True)
    tokens = len(pairs) // 341
    x = torch.cat((pairs, third), 1)[: 341 * tokens].view(1, tokens, 1023)
    what = TokenFormat(*(IntegerCodec(1023, each, 3) for each in bits))
    both = one_store(PageLayout.sized(what, 64), 1)
    both.do("append", torch.arange(1), x, x, torch.ones(1, tokens, dtype=torch.bool))


@pytest.mark.parametrize("to", NAMED.values(), ids=NAMED)
def test_plain_numbers_are_rounded_as_torch_does(to) -> None:
    g = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (3, 40, 300), generator=g).int()
    bits[1] &= ~0x1FFF  # halves, and the midpoints between two
    bits[1] |= torch.randint(0, 3, (40, 300), generator=g).int() * 0x1000
    x = torch.cat((bits.view(torch.float32), vectors(g, 3, 5, 300)), 1).nan_to_num(0.0, 3e38, -3e38)
    x[0, :2, 0] = torch.tensor([torch.inf, -torch.inf])
    both = one_store(PageLayout.sized(TokenFormat(RawCodec(300, to), RawCodec(1, to)), 7))
    for dtype in DTYPES:
        keep = torch.ones(3, 45, dtype=torch.bool)
        both.do("append", torch.arange(3), x.to(dtype), x[..., 1:2].to(dtype), keep)


def test_what_is_stored_as_it_is_keeps_every_bit() -> None:
    """Including the payload of a NaN, if the stored dtype is the input's."""
    bits = torch.randint(-(2**15), 2**15, (1, 3, 512), generator=torch.Generator().manual_seed(0))
    bits = torch.cat((bits, torch.tensor([0x7C01, 0x7E55, -1]).expand(1, 3, 3)), 2).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        x = bits.view(dtype)
        both = one_store(PageLayout.sized(TokenFormat(*[RawCodec(515, dtype)] * 2), 2), 1)
        both.do("append", torch.arange(1), x, -x, torch.ones(1, 3, dtype=torch.bool))


@pytest.mark.parametrize(("keys", "values", "key", "value", "tokens"), FORMATS[1:6:2])
def test_tokens_at_any_places_of_memory_without_a_scratch_page(
    keys, values, key, value, tokens
) -> None:
    g = torch.Generator().manual_seed(tokens)
    layout = PageLayout.sized(form(keys, values, key, value), tokens)
    count = 37
    pages = -(-count // tokens) + 1
    place = torch.randperm(pages * tokens, generator=g)[:count]
    # External memory may be unaligned, and its rows may have gaps.
    room = torch.full((pages, layout.nbytes + tokens), 0xFF, dtype=torch.uint8)
    x = [strided(vectors(g, count, 1, dim).half(), 2) for dim in (key, value)]
    found = []
    for kernels, device in ((torch_kernels, "cpu"), (triton_kernels, DEVICE)):
        memory = room.clone().to(device)
        data = memory[:, tokens // 2 :][:, : layout.nbytes]
        args = [each.to(device) for each in (place // tokens, place % tokens, *x)]
        kernels.place(data, layout, *args)
        kernels.place(data, layout, *(each[:0] for each in args))
        kernels.copy_pages(data, args[0][:1], (args[0][:1] + 1) % pages)
        found.append(memory.cpu())
    assert torch.equal(*found)
    assert not torch.equal(found[0], room)


def test_scores_that_are_infinite_or_nan_and_tokens_that_are_equal() -> None:
    raw = RawCodec(1, torch.float32)
    both = one_store(PageLayout.sized(TokenFormat(raw, raw), 3, True, True), 6)
    inf, nan = torch.inf, torch.nan
    rows = ([3, 2, 2, 5], [inf] * 4, [1, nan, 0, nan], [inf, 1, -inf, -inf], [1, 0.0, -0.0, 1])
    score = torch.tensor([*rows, [1] * 4])
    x, place = torch.zeros(6, 4, 1), torch.arange(4).expand(6, 4)
    keep = torch.ones(6, 4, dtype=torch.bool)
    keep[5] = False
    both.do("append", torch.arange(6), x, x, keep, score, place)
    both.do("weakest_all")
    both.do("weakest_all", torch.tensor([2, 0, 1, 4, 1, 2]))


def test_a_store_that_holds_nothing() -> None:
    both = one_store(PageLayout.sized(form("4", "4", 4, 4), 3, True, True))
    both.do("read_layer", 0, BOTH)
    _, place = both.do("weakest_all")
    assert place.tolist() == [-1] * 3
    both.do("set_layer_scores", 0, torch.zeros(3, 0))
    both.do("compact", torch.arange(3), torch.zeros(3, 0, dtype=torch.bool))


def test_prompts_of_many_blocks() -> None:
    """More tokens than any program processes, or sums, at a time."""
    g = torch.Generator().manual_seed(1)
    both = one_store(PageLayout.sized(form("float16", "bfloat16", 2, 3), 13, True, True), 1)
    x, place = vectors(g, 1, 1050, 5), torch.arange(1050)[None]
    keep = torch.rand(1, 1050, generator=g) < 0.99
    rows = (x[..., :2], x[..., 2:].bfloat16(), keep, torch.randn(1, 1050, generator=g), place)
    both.do("append", torch.arange(1), *rows)
    both.do("weakest_all")
    both.do("set_layer_scores", 0, torch.randn(1, both.each[0].longest, generator=g))
    both.do("compact", torch.arange(1), torch.rand(1, 1050, generator=g) < 0.6)


def tiers_of(forms: list[TokenFormat], tokens: int, shape: tuple[int, int, int]) -> Both:
    forms = sorted(forms, key=lambda one: one.nbytes, reverse=True)  # all formats fit
    layouts = fit(forms, tokens, True, True)
    return Both(lambda pool: Tiers(pool, layouts, *shape), layouts[0].nbytes)


@pytest.mark.parametrize(
    ("kinds", "dims", "tokens"),
    [
        ([("8", "4"), ("4", "2")], (16, 16), 1),
        ([("bfloat16", "float32"), ("8/5", "4/2"), ("4", "2")], (13, 7), 3),
        ([("float16", "8"), ("8", "4/3"), ("4", "2"), ("2", "1")], (20, 5), 2),
        ([("8", "4")], (5, 3), 2),
    ],
)
def test_steps_of_tiers(kinds, dims, tokens) -> None:
    both = tiers_of([form(*each, *dims) for each in kinds], tokens, (2, 3, 2))
    Program(both, len(kinds), 12, 3, dims).run(2, 2)


@pytest.mark.parametrize("tokens", [1, 3])
def test_steps_of_heads_of_several_kinds(tokens) -> None:
    dims = [(8, 6), (3, 5), (8, 1)]
    forms = [form(*each, *dim) for dim in dims for each in (("bfloat16", "float32"), ("4", "2"))]
    layouts = fit(forms, tokens, True, True)
    by_kind = [layouts[i : i + 2] for i in (0, 2, 4)]
    kind = torch.tensor([[0, 2], [1, 2]])
    both = Both(lambda pool: PerHeadRankTiers(pool, by_kind, kind, 3), layouts[0].nbytes)
    Program(both, 2, 12, 3, (8, 6)).run(3)


def test_vectors_in_float64_are_encoded_by_torch() -> None:
    both = tiers_of([form("8", "4", 5, 4), form("4", "2", 5, 4)], 3, (1, 3, 4))
    Program(both, 2, 12, 3, (5, 4)).run(2, dtypes=[torch.float64, torch.float32])
    x = vectors(torch.Generator().manual_seed(0), 12, 2, 9).double()
    keep, score = torch.ones(12, 2, dtype=torch.bool), torch.ones(12, 2)
    both.do("append", 0, torch.arange(12), x[..., :5], x[..., 5:], keep, score, score.int())


def test_a_step_changes_everything_where_it_lies() -> None:
    both = tiers_of([form("8", "4", 5, 4), form("4", "2", 5, 4)], 1, (1, 3, 4))
    program = Program(both, 2, 12, 3, (5, 4))
    program.append()
    both.make_room()
    pool, tiers = both.pools[1], both.each[1]

    def tensors() -> list[Tensor]:
        stores = [x for store in tiers.stores for x in (store.table, store.length)]
        return [pool.padded, pool.ring.ids, pool.ring.start, pool.ring.count, *stores]

    before = tensors()
    copies = [x.clone() for x in before]
    program.step()
    program.step()
    assert [x.data_ptr() for x in before] == [x.data_ptr() for x in tensors()]
    assert not any(torch.equal(*each) for each in zip(before[:4], copies[:4], strict=True))


@pytest.mark.gpu
def test_a_step_can_be_captured_and_replayed() -> None:
    made = [tiers_of([form("8", "4", 16, 16), form("4", "2", 16, 16)], 3, (1, 3, 4)) for _ in "ab"]
    zeros = torch.zeros(12, dtype=torch.uint8)
    for both in made:
        program = Program(both, 2, 12, 3, (16, 16))
        program.append()
        _, place = both.do("weakest")
        both.make_room()
        tokens = [x[:, 0] for x in program.tokens(12, 1)]
        rest = (zeros, zeros, zeros + 1, place, *tokens)
        if both is made[0]:
            both.do("step", *rest)  # compiles
            continue
        there = [x.to(DEVICE) for x in rest]
        tiers = both.each[1]
        work = tiers.work(*_work(there))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            triton_kernels.step(both.pools[1], [work])
        for _ in range(3):
            graph.replay()
            both.each[0].step(*rest)
            both.check()


def _work(rest: list[Tensor]) -> tuple[object, ...]:
    from kv_paging.work import NewTokens, Placement

    return Placement(*rest[:3]), rest[3], NewTokens(*rest[4:])


def test_what_is_not_for_these_kernels_goes_to_torch() -> None:
    known = PageLayout.sized(form("8", "4", 5, 3), 2)
    assert declined("triton", known, DEVICE) is None
    assert select_page_kernels(known, DEVICE, "triton") is triton_kernels
    assert select_page_kernels(known, torch.device("cuda")) is triton_kernels  # the choice there
    assert select_page_kernels(known, torch.device("meta")) is torch_kernels
    wide = PageLayout.sized(form("8", "4", 1025, 3), 2)
    assert declined("triton", wide, DEVICE) == "vectors of more than 1024 dimensions"
    assert select_page_kernels(wide, DEVICE, "triton") is torch_kernels
    channels = PageLayout.sized(TokenFormat(*[ChannelCodec(4, 2, 32)] * 2), 32)
    assert "by its own code" in declined("triton", channels, DEVICE)


def test_without_a_gpu_it_says_what_is_missing(monkeypatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    layout = PageLayout.sized(form("8", "4", 5, 3), 2)
    assert triton_kernels.declined(layout, torch.device("cpu")) == "pages on cpu"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    reason = "torch finds no GPU, and TRITON_INTERPRET is not set"
    assert declined("triton", layout, DEVICE) == reason
    with pytest.raises(ValueError, match=f"'triton' cannot be used here: {reason}"):
        select_page_kernels(layout, DEVICE, "triton")
    monkeypatch.setattr("kv_policy.interpreter.find_spec", lambda name: None)
    assert declined("triton", layout, DEVICE) == "the package triton is not installed"


def test_triton_is_imported_by_who_uses_it() -> None:
    code = """
import sys, torch
from kv_paging import PagePool, TokenStore, triton_kernels
from kv_policy import PageLayout, RawCodec, TokenFormat
from kv_policy.interpreter import SWITCH
codec = RawCodec(2, torch.float16)
layout = PageLayout.sized(TokenFormat(codec, codec), 2)
TokenStore(PagePool(layout.nbytes), layout, 1, 1, 1)
triton_kernels.missing(), triton_kernels.declined(layout, torch.device("cpu"))
sys.exit("triton" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
