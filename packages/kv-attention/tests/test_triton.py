"""The GPU kernels, compared with the reference; without a GPU they use Triton's interpreter.

Every operation of the interpreter has a fixed cost for any tile size, so there are few cases, and
each covers several features.
"""

from dataclasses import replace
from typing import no_type_check

import pytest
import torch
import triton
import triton.language as tl

from attention_cases import Case
from attention_judge import assert_same_observation, assert_same_output
from kv_attention import Attended, DenseTokens, attend
from kv_attention.gpu.arguments import paged_part
from kv_attention.gpu.backend import declined
from kv_attention.gpu.planes import planar
from kv_attention.gpu.tiles import bounded
from kv_policy import Observe, PagedTokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

MANY = {
    "tiers": [("8", "4"), ("4", "2"), ("1", "1"), ("float16", "float32")],
    "stored": 80,
    "window": 7,
    "D": 17,
    "Dv": 3,
    "padding": "left",
}
HOLES = {
    "tiers": [("2", "8"), ("bfloat16", "float16")],
    "group": 4,
    "D": 17,
    "Dv": 9,
    "holes": True,
    "reverse": True,
    "spare": 3,
    "page": 7,
    "stored": 40,
    "padding": "all",
}
SINGLE = {"tiers": [("4", "bfloat16")], "stored": 9, "page": 1, "D": 5, "Dv": 4, "spare": 3, "G": 1}
ALIGNED = {"tiers": [("8", "4")], "stored": 200, "page": 64, "D": 32, "Dv": 32, "G": 5, "H": 1}
NOTHING = {"tiers": [("8", "8")], "stored": 0, "fresh": False}
SOFTMAX = {"softcap": 1.5, "sinks": True}
CASES = {
    "many": MANY,
    "holes": HOLES,
    "single": SINGLE,
    "aligned": ALIGNED,
    "nothing": NOTHING,
    "many, sinks and a bound": MANY | SOFTMAX,
    "holes, sinks": HOLES | {"sinks": True},
    "aligned, a bound": ALIGNED | {"softcap": 1.5},
    "nothing, sinks": NOTHING | {"sinks": True},
}


def pytest_generate_tests(metafunc):
    if "shape" in metafunc.fixturenames:
        metafunc.parametrize("shape", CASES.values(), ids=CASES)


@pytest.mark.parametrize("L", [1, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.grid(3)
def test_output(case, shape, L, dtype):
    assert_same_output(case(3, L=L, dtype=dtype, **shape).to(DEVICE), "triton")


PLANES = {"tiers": [("8", "4"), ("4", "2"), ("2", "8")], "D": 64, "Dv": 64, "padding": "left"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "more", [{"page": 16}, {"page": 7, "holes": True, "reverse": True} | SOFTMAX]
)
def test_codes_by_plane(case, more, dtype):
    """As wide as a power of two, with one scale for a vector, and queries of 16 bits."""
    c = case(3, L=1, dtype=dtype, stored=150, **PLANES, **more).to(DEVICE)
    for pages in c.pages:
        part = paged_part(pages, watched=False)
        assert planar(part, part.products(dtype, interpreted=True))
    assert_same_output(c, "triton")
    assert_same_observation(c, Observe(None, "max"), error=1e-3, backend="triton")


@pytest.mark.parametrize(
    ("tiers", "D", "dtype"),
    [
        ("8", 64, torch.float32),
        ("8", 48, torch.float16),
        ("1", 64, torch.float16),
        ("2", 32, torch.float16),
    ],
)
def test_codes_that_have_no_planes(case, tiers, D, dtype):
    c = case(3, L=1, dtype=dtype, tiers=[(tiers, tiers)], D=D, Dv=D)
    part = paged_part(c.pages[0], watched=False)
    assert not planar(part, part.products(dtype, interpreted=True))


def test_dense_tokens_in_another_type_than_the_queries(case):
    c = case(4, L=1, tiers=[], window=30)
    halves = [DenseTokens(d.key.half(), d.value, d.position) for d in c.dense]
    assert_same_output(Case(c.q, c.position, [], halves, []).to(DEVICE), "triton")


FEW = {"stored": 9, "B": 1, "H": 1, "page": 3, "window": 4, "group": 600, "scale": 0.05}
LATENT = FEW | {"tiers": [("8", "4"), ("float16", "4")], "D": 576, "Dv": 512}
LARGE = {
    "latent, sinks": LATENT | {"sinks": True},
    "latent, groups, a bound": LATENT | {"group": 96, "softcap": 1.5},
    "512": FEW | {"tiers": [("4", "2"), ("float16", "float16")], "D": 512, "Dv": 512} | SOFTMAX,
    "300": FEW | {"tiers": [("8", "4")], "D": 300, "Dv": 257},
    "values of fewer": FEW | {"tiers": [("8", "4")], "D": 192, "Dv": 128, "sinks": True},
}


@pytest.mark.parametrize("L", [1, 6])
@pytest.mark.parametrize("large", LARGE.values(), ids=LARGE)
@pytest.mark.grid(3)
def test_large_heads(case, large, L):
    c = case(3, L=L, dtype=torch.float16, **large).to(DEVICE)
    assert declined(c.inputs()) is None
    assert_same_output(c, "triton")
    assert_same_observation(c, Observe(None, "max"), error=1e-3, backend="triton")


def test_large_heads_in_float32_go_through_torch(case):
    given = FEW | {"D": 300, "Dv": 8, "sinks": True, "softcap": 1.5}
    for names, dtype in (
        ("8", torch.float32),
        ("float32", torch.float16),
        ("bfloat16", torch.float16),
    ):
        c = case(3, L=1, dtype=dtype, tiers=[(names, "8")], **given).to(DEVICE)
        assert declined(c.inputs()).startswith("products in float32")
        assert_same_output(c, "triton")
    same = case(3, L=1, dtype=torch.bfloat16, tiers=[("bfloat16", "8")], **given).to(DEVICE)
    assert declined(same.inputs()) is None


WATCHED = {
    "all": Observe(last=None),
    "max": Observe(5, "max", power=2, skip=4, also=frozenset({"entropy", "squares"})),
    "max-of-sums": Observe(None, "max-of-sums", skip=1),
    "mean": Observe(2, "mean", above=0.5),
}


@pytest.mark.parametrize("L", [1, 11])
@pytest.mark.parametrize("observe", WATCHED.values(), ids=WATCHED)
@pytest.mark.grid(3)
def test_observation(case, shape, L, observe):
    shape = {**shape, "stored": min(shape["stored"], 40)}
    assert_same_observation(case(3, L=L, **shape).to(DEVICE), observe, backend="triton")


@pytest.mark.parametrize("L", [1, 4])
def test_several_observations_of_a_pass(case, L):
    c = case(5, L=L, window=3).to(DEVICE)
    wanted = [Observe(last=0), Observe(last=2), Observe(None, gumbel=1.0)]
    found = c.attend(wanted[0], "triton", wanted[1:])
    assert found.mass == ()
    for mine, what in zip(found.others, wanted[1:], strict=True):
        expected: Attended = c.attend(what, "reference")
        for got, want in zip(mine.mass, expected.mass, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_decode_step_does_not_look_at_lengths(case, monkeypatch):
    c = case(6, L=1, known=True).to(DEVICE)

    def waits(self):
        raise AssertionError("the host waited for the device")

    for name in ("item", "tolist", "__int__", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, waits)
    c.attend(backend="triton")


def test_one_query_of_one_long_table_row_is_shared_out(case):
    c = case(7, B=1, H=1, L=1, stored=700, ragged=False, fresh=False, tiers=[("4", "4")])
    assert_same_output(c.to(DEVICE), "triton")


def test_pages_inside_a_wider_tensor(case):
    c = case(10, L=1, tiers=[("8", "4")]).to(DEVICE)
    (pages,) = c.pages
    wide = pages.data.new_full((len(pages.data), pages.layout.nbytes + 9), 255)
    wide[:, 5:-4] = pages.data
    inside = PagedTokens(wide[:, 5:-4], pages.table.long(), pages.length, pages.layout)
    moved = Case(c.q, c.position, [inside], c.dense, c.page_positions)
    assert torch.equal(moved.attend(backend="triton").out, c.attend(backend="triton").out)


@pytest.mark.parametrize(
    "refused",
    [
        {"dtype": torch.float64},
        {"D": 577, "stored": 3, "sinks": True},
        {"D": 8, "Dv": 513, "stored": 3, "softcap": 1.5},
        {"tiers": [("shared", "shared")], "block": 4, "page": 2},
        {"tiers": [("float64", "8")]},
    ],
    ids=["queries", "dimensions of keys", "of values", "blocks", "numbers"],
)
def test_torch_does_what_kernels_do_not(case, refused):
    assert_same_output(case(8, L=1, **refused).to(DEVICE), "triton")


def test_gradients_go_through_torch(case):
    c = case(9, L=2, tiers=[], padding="none", sinks=True).to(DEVICE)
    for q, sinks in ((c.q.clone().requires_grad_(), c.sinks), (c.q, c.sinks.requires_grad_())):
        out = attend(q, c.position, [], c.dense, c.scale, backend="triton", sinks=sinks).out
        out.sum().backward()
        for x in (q, sinks):
            assert not x.requires_grad or (x.grad != 0).any()


def test_a_bound_that_float32_cannot_divide_by_goes_through_torch(case):
    c = replace(case(9, L=2), softcap=1e-40).to(DEVICE)
    assert_same_output(c, "triton")


@pytest.mark.parametrize("L", [1, 5])
@pytest.mark.parametrize("level", [-30.0, 40.0])
def test_sinks_count_once_for_each_query(case, L, level):
    c = case(11, B=1, H=2, L=L, stored=150, tiers=[("8", "4"), ("4", "2")], window=5, sinks=True)
    assert_same_output(replace(c, sinks=c.sinks + level).to(DEVICE), "triton")


@pytest.mark.parametrize("most", [0.5, 50.0])
def test_the_bound_of_logits_is_tanh_to_the_rounding_of_float32(most):
    x = torch.cat((torch.linspace(-12, 12, 2001), torch.logspace(-8, 3, 400), torch.tensor([0.0])))
    x = torch.nn.functional.pad(x * most, (0, 4096 - len(x)), value=torch.nan).to(DEVICE)
    found = torch.empty_like(x)
    bounding[(1,)](x, found, most, SIZE=4096)
    want = most * (x.double() / most).tanh()
    torch.testing.assert_close(found.double(), want, rtol=6e-7, atol=0, equal_nan=True)


@triton.jit
@no_type_check
def bounding(x, found, most, SIZE: tl.constexpr):
    """Apply the bound of logits."""
    at = tl.arange(0, SIZE)
    tl.store(found + at, bounded(tl.load(x + at), most))
