"""Native prefill, compared with the reference, for each available instruction set."""

import os
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_cases import Case, pack, random_case
from attention_judge import SHAPES, TOLERANCE, assert_same_output
from kv_attention import DenseTokens, torch_backend
from kv_cpu import arguments, backend, chosen, prompt
from kv_cpu.few import MOST
from kv_cpu.library import FORCE
from kv_policy import Observe, RawCodec
from native_sets import NARROW, PROMPT_SETS

NAMES = st.sampled_from(["8", "4", "3", "2", "1", "4n", "3n", "float16", "bfloat16", "float32"])
TIERS = st.lists(st.tuples(NAMES, NAMES), max_size=3)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LENGTHS = st.sampled_from([MOST + 1, 31, 33, 70])


@pytest.fixture(scope="module", params=PROMPT_SETS)
def isa(request):
    """Force each instruction set."""
    with patch.dict(os.environ, {FORCE: request.param}):
        yield request.param


def native(c, threads=1):
    """Compute attention natively; `plain` is called as well, though torch replaces it."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return prompt.attend_to_all(c.inputs())
    finally:
        torch.set_num_threads(before)


def exact_lse(c):
    """Return the log-sum-exp of each query in float64."""
    return torch_backend.forward(replace(c, q=c.q.double()).inputs()).lse


def assert_native(c, threads=1):
    found = native(c, threads)
    expected = c.attend(backend="reference").out
    assert found.out.dtype == c.q.dtype
    error = TOLERANCE[c.q.dtype]
    torch.testing.assert_close(found.out.double(), expected.double(), rtol=error, atol=error)
    torch.testing.assert_close(found.lse.double(), exact_lse(c), rtol=1e-5, atol=1e-5)
    return found


@settings(max_examples=40)
@given(st.integers(0, 99), SHAPES, LENGTHS, st.sampled_from(DTYPES), TIERS)
def test_any_prompt(case, isa, seed, shape, length, dtype, tiers):
    assert_native(case(seed, tiers=tiers, **shape | {"L": length, "dtype": dtype}))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 31, 33, 64, 80, 128, 300])
@pytest.mark.parametrize(
    "names", [("8", "4"), ("4", "2"), ("3", "4n"), ("3n", "3"), ("bfloat16", "float32")]
)
@pytest.mark.grid(3)
def test_dimensions(case, isa, dtype, dim, names):
    shape = {"D": dim, "Dv": dim + 3, "group": dim, "L": 40, "stored": 300, "page": 16}
    assert_native(case(1, B=1, tiers=[names], dtype=dtype, scale=dim**-0.5, **shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(512, 512), (576, 512), (192, 128)], ids=str)
@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (2.0, True)])
@pytest.mark.grid(3)
def test_large_heads_and_values_of_other_dimensions(case, isa, dtype, dims, softcap, sinks):
    D, Dv = dims
    shape = {"D": D, "Dv": Dv, "group": D, "L": 40, "stored": 40, "page": 16}
    tiers = [("8", "4"), ("bfloat16", "bfloat16")]
    c = case(6, B=1, tiers=tiers, dtype=dtype, scale=2 * D**-0.5, **shape)
    assert_native(replace(c, softcap=softcap, sinks=torch.randn(2, 2) + 2 if sinks else None))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("level", [-30.0, 3.0, 40.0])
@pytest.mark.grid(3)
def test_sinks_count_once_for_each_query(case, isa, threads, level):
    c = case(7, B=1, G=3, L=150, stored=300, page=16, D=64, Dv=64, scale=0.1, sinks=True)
    found = assert_native(replace(c, sinks=c.sinks + level), threads)
    bare = native(c)
    share = (exact_lse(replace(c, sinks=None)) - (c.sinks + level)[:, :, None]).sigmoid().float()
    torch.testing.assert_close(found.out, native(replace(c, sinks=None)).out * share[..., None])
    assert bare.out.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 4, 8, 13, 97])
@pytest.mark.grid(3)
def test_query_groups(case, isa, dtype, group):
    shape = {"B": 1, "H": 2, "G": group, "L": 30, "D": 16, "Dv": 16, "padding": "left"}
    c = case(2, tiers=[("8", "4")], stored=40, page=16, window=4, dtype=dtype, **shape)
    assert_native(c)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [1, 31, 32, 33, 255, 256, 257, 600])
@pytest.mark.parametrize("page", [1, 300])
@pytest.mark.grid(3)
def test_blocks_that_are_full_or_not(case, isa, dtype, stored, page):
    shape = {"B": 1, "H": 1, "L": 20, "ragged": False, "fresh": False, "dtype": dtype}
    assert_native(case(3, tiers=[("8", "4"), ("bfloat16", "1")], stored=stored, page=page, **shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.grid(3)
def test_the_same_in_any_number_of_threads(case, isa, dtype, holes):
    tiers = [("8", "4"), ("4", "2"), ("float16", "float16")]
    shape = {"B": 2, "G": 3, "L": 260, "D": 32, "Dv": 32, "group": 32, "padding": "left"}
    c = case(4, tiers=tiers, stored=400, page=16, window=40, holes=holes, dtype=dtype, **shape)
    one = assert_native(c)
    for threads in (2, 5):
        more = native(c, threads)
        assert torch.equal(one.out, more.out)
        assert torch.equal(one.lse, more.lse)


def test_two_chunks_come_to_what_one_prompt_does(isa):
    """The first chunk is in pages when the second one is computed."""
    g = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 2, n, 340, 24, generator=g) for n in (3, 1, 1))
    k, v, place = k[:, :, 0], v[:, :, 0], torch.arange(340).expand(2, -1)
    first, codec = 290, RawCodec(24, torch.float32)
    pages = pack(k[:, :, :first], v[:, :, :first], torch.full((2, 2), first), (codec, codec), 7, 0)

    def attended(at, stored):
        tokens = [DenseTokens(k[:, :, at], v[:, :, at], place[:, at])]
        return native(Case(q[..., at, :], place[:, at], stored, tokens, [None] * len(stored)))

    one, two = attended(slice(None), []), attended(slice(first, None), [pages])
    torch.testing.assert_close(one.out[..., first:, :], two.out, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(one.lse[..., first:], two.lse, rtol=2e-6, atol=2e-6)


def test_partials_of_pages_and_of_plain_tokens_add_up(case, isa):
    c = case(6, L=40, tiers=[("8", "4"), ("4", "2")], window=4, padding="left")
    parts = native(replace(c, dense=[])) + native(replace(c, pages=[], page_positions=[]))
    whole = native(c)
    torch.testing.assert_close(parts.out, whole.out, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(parts.lse, whole.lse, rtol=2e-6, atol=2e-6)


def test_queries_that_see_nothing(case, isa):
    c = case(7, B=2, L=40, tiers=[("8", "4")], window=5, fresh=False)
    c.pages[0].length[0] = 0
    c.dense[0].position[0] = -1
    found = assert_native(c)
    assert not found.out[0].any()
    assert found.lse[0].isneginf().all()


def test_no_tokens_at_all(case, isa):
    found = native(case(8, L=12, tiers=[], fresh=False))
    assert not found.out.any()
    assert found.lse.isneginf().all()


def test_queries_in_any_order_of_positions(case, isa):
    c = case(9, B=2, L=50, padding="left", window=4)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    mixed = native(replace(c, q=c.q[..., order, :], position=c.position[:, order]))
    whole = native(c)
    assert torch.equal(mixed.out, whole.out[..., order, :])
    assert torch.equal(mixed.lse, whole.lse[..., order])


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_with_any_strides(case, isa, dtype):
    c = case(10, B=2, L=40, G=2, D=9, Dv=9, tiers=[("8", "4")], window=6, dtype=dtype)
    expected = native(c)
    turned = c.q.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4)
    spread = torch.stack([turned] * 2, dim=-1)[..., 0]
    tokens = c.dense[1]
    key = tokens.key.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.full((2, tokens.key.shape[2] + 3), 7)
    wide[:, 1:-2] = tokens.position
    dense = [c.dense[0], DenseTokens(key, tokens.value, wide[:, 1:-2])]
    for q in (turned, spread):
        moved = native(replace(c, q=q, dense=dense))
        assert torch.equal(moved.out, expected.out)
        assert torch.equal(moved.lse, expected.lse)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-3, 30.0])
def test_scales_of_any_sign_and_size(case, isa, scale):
    c = case(11, L=40, tiers=[("8", "4")], window=4, scale=scale)
    expected = c.attend(backend="reference").out
    torch.testing.assert_close(native(c).out.double(), expected.double(), rtol=3e-4, atol=3e-4)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("names", [("8", "8"), ("8", "4"), ("1", "2"), ("bfloat16", "bfloat16")])
@pytest.mark.grid(3)
def test_weights_in_bfloat16_are_all_that_is_rounded(case, isa, names, seed):
    """Each by half of 2**-8, and the output once more."""
    shape = {"D": 64, "Dv": 64, "group": 64, "L": 60, "stored": 500, "page": 16}
    c = case(seed, tiers=[names], dtype=torch.bfloat16, scale=0.125, **shape)
    double = replace(c, q=c.q.double())
    parts = torch_backend.parts_of(double.inputs())
    values = [part.both(at)[1].plain().rows for part in parts for at in part.spans(10**6)]
    exact = double.attend(backend="reference").out
    most = max(float(x.abs().max()) for x in values)
    assert (native(c).out.double() - exact).abs().max() < 2**-8 * most


def test_in_inference_mode(case, isa):
    c = case(13, L=20, tiers=[("8", "4")], window=4)
    expected = native(c).out
    with torch.inference_mode():
        found = native(c)
        assert torch.equal(found.out, expected)


def test_the_backend_makes_prompts_without_torch(case):
    c = case(14, L=40, tiers=[("8", "4")], window=4, padding="left", dtype=torch.bfloat16)
    assert backend.declined(c.inputs()) is None
    with patch("kv_cpu.attention_mass.forward", side_effect=AssertionError("torch attended")):
        found = c.attend(Observe(None, "sum"), backend="cpu")
    assert torch.equal(found.out, native(c).out)
    total = torch.cat(found.mass, dim=-1).sum(dim=-1)
    real = (c.position >= 0).sum(dim=1)[:, None] * c.q.shape[2]
    # Kept weights may be rounded to bfloat16.
    error = 2e-5 + 2**-8 * (chosen() in NARROW)
    torch.testing.assert_close(total, real.expand(total.shape).float(), rtol=error, atol=0)


def test_what_is_left_to_torch_has_a_reason():
    for change, reason in (
        ({"L": MOST}, "8 queries of a sequence"),
        ({"dtype": torch.float64}, "float64"),
        ({"tiers": [("shared", "8")]}, "read and written by its own code"),
    ):
        c = random_case(15, **{"L": 20} | change)
        assert reason in prompt.declined(c.inputs())
        assert_same_output(c, "cpu", 1e-3)  # a few queries are decoded, by any instruction set
    c = random_case(15, L=20)
    assert "AVX2" in prompt.declined(c.inputs(), "plain")


@pytest.mark.parametrize("threads", [1, 3])
def test_a_page_outside_of_the_pool_is_an_error(case, isa, threads):
    c = case(16, L=20, stored=300, page=16, tiers=[("8", "4"), ("4", "2")])
    c.pages[1].table[1, 1, 0] = 10**6
    with pytest.raises(RuntimeError, match=r"pages\[1\] has page 1000000 in its table"):
        native(c, threads)


def test_arguments_that_do_not_fit_are_errors(case):
    c = case(17, L=20, tiers=[], D=8, Dv=8)
    parts = arguments.parts(c.inputs(), watched=False)
    for q, position, isa, reason in (
        (
            c.q[0],
            c.position,
            "plain",
            r"q is float\d+ .*; it must be float32, .* \[any, any, any, any, any\]",
        ),
        (c.q, c.position[:, 1:], "plain", r"position is int64 .* it must be int64 \[\d+, 20\]"),
        (
            c.q[..., :5],
            c.position,
            "plain",
            "part 0 has keys and values of 8 and 8 dimensions; queries and the output have 5 and 8",
        ),
        (c.q, c.position, "mmx", "no kernels for mmx here"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            torch.ops.kv_cpu.prompt(q, position, *parts, [], 0, 8, 0.3, 0.0, [], isa)
