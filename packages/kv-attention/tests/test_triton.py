"""The GPU kernels, compared with the reference; without a GPU they use Triton's interpreter.

Every operation of the interpreter has a fixed cost for any tile size, so there are few cases, and
each covers several features.
"""

import pytest
import torch

from attention_cases import Case
from attention_judge import assert_same_observation, assert_same_output
from kv_attention import Attended, DenseTokens, attend
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
CASES = {"many": MANY, "holes": HOLES, "single": SINGLE, "aligned": ALIGNED, "nothing": NOTHING}


def pytest_generate_tests(metafunc):
    if "shape" in metafunc.fixturenames:
        metafunc.parametrize("shape", CASES.values(), ids=CASES)


@pytest.mark.parametrize("L", [1, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.grid(3)
def test_output(case, shape, L, dtype):
    assert_same_output(case(3, L=L, dtype=dtype, **shape).to(DEVICE), "triton")


def test_dense_tokens_in_another_type_than_the_queries(case):
    c = case(4, L=1, tiers=[], window=30)
    halves = [DenseTokens(d.key.half(), d.value, d.position) for d in c.dense]
    assert_same_output(Case(c.q, c.position, [], halves, []).to(DEVICE), "triton")


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
        {"D": 300, "stored": 3},
        {"tiers": [("shared", "shared")], "block": 4, "page": 2},
        {"tiers": [("float64", "8")]},
    ],
    ids=["queries", "dimensions", "blocks", "numbers"],
)
def test_torch_does_what_kernels_do_not(case, refused):
    assert_same_output(case(8, L=1, **refused).to(DEVICE), "triton")


def test_gradients_go_through_torch(case):
    c = case(9, L=2, tiers=[], padding="none").to(DEVICE)
    q = c.q.clone().requires_grad_()
    attend(q, c.position, [], c.dense, c.scale, backend="triton").out.sum().backward()
    assert q.grad is not None
    assert (q.grad != 0).any()
