from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kv_policy import fold_values
from kv_svd import Moments, basis, of_output, of_queries, of_tokens, ranks, rotation

B, H, G, L, D, HIDDEN = 2, 3, 2, 30, 8, 20
F64 = torch.float64
laws = settings(deadline=None, derandomize=True, max_examples=40)


def samples(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and queries with directions of different sizes, as in real models."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(0, -3, D, dtype=F64)
    turn = torch.linalg.qr(torch.randn(H, D, D, dtype=F64, generator=generator)).Q
    k = torch.randn(B, H, L, D, dtype=F64, generator=generator) * spread @ turn
    q = torch.randn(B, H, G, L, D, dtype=F64, generator=generator) * spread @ turn[:, None]
    return k, q


def stacked(k: Tensor, q: Tensor) -> Tensor:
    rows = [k.transpose(0, 1).flatten(1, 2), q.movedim(1, 0).flatten(1, 3)]
    return torch.cat(rows, dim=1)  # H n D


def test_it_is_the_svd_of_the_stacked_rows() -> None:
    k, q = samples()
    found = rotation(of_tokens(k) + of_queries(q))
    _, singular, right = torch.linalg.svd(stacked(k, q), full_matrices=False)
    torch.testing.assert_close(found.singular, singular, rtol=1e-6, atol=1e-9)
    overlap = (found.matrix.mT @ right.mT).abs()
    torch.testing.assert_close(overlap, torch.eye(D, dtype=F64).expand(H, D, D), rtol=0, atol=1e-6)


def test_at_full_rank_attention_logits_are_exact() -> None:
    k, q = samples()
    found = basis(rotation(of_tokens(k) + of_queries(q)), torch.full((H,), D), F64)
    logits = found.project_queries(q) @ found.project(k)[:, :, None].mT
    torch.testing.assert_close(logits, q @ k[:, :, None].mT, rtol=1e-12, atol=1e-12)


def test_values_paired_with_the_output_projection_are_exact_at_full_rank() -> None:
    x, v_proj = torch.randn(L, HIDDEN, dtype=F64), torch.randn(H * D, HIDDEN, dtype=F64)
    o_proj = torch.randn(HIDDEN, H * G * D, dtype=F64)
    v = (x @ v_proj.mT).unflatten(-1, (H, D)).transpose(0, 1)
    moments = of_tokens(v[None]) + of_output(o_proj, H, D)
    assert moments.rows == L + G * HIDDEN
    found = basis(rotation(moments), torch.full((H,), D), F64)
    folded_v, folded_o = fold_values(found, v_proj, o_proj)
    each = torch.eye(G, dtype=F64).repeat(H, 1, 1)  # every query head takes its KV head's value
    whole = torch.einsum("lhd,hgk->lhgd", (x @ v_proj.mT).unflatten(-1, (H, D)), each)
    reduced = torch.einsum("lhd,hgk->lhgd", (x @ folded_v.mT).unflatten(-1, (H, D)), each)
    torch.testing.assert_close(
        reduced.flatten(1) @ folded_o.mT, whole.flatten(1) @ o_proj.mT, rtol=1e-12, atol=1e-11
    )


@laws
@given(st.integers(0, 1000))
def test_what_is_cut_off_is_what_the_singular_values_say(seed: int) -> None:
    """Eckart-Young: the squared error of all rows is the sum of the omitted squares."""
    k, q = samples(seed)
    rows = stacked(k, q)
    found = rotation(of_tokens(k) + of_queries(q))
    before = torch.full((H,), torch.inf, dtype=F64)
    for rank in range(1, D + 1):
        matrix = basis(found, torch.full((H,), rank), F64).matrix
        error = (rows - rows @ matrix @ matrix.mT).square().sum((1, 2))
        left_out = found.singular[:, rank:].square().sum(-1)
        torch.testing.assert_close(error, left_out, rtol=1e-5, atol=1e-10)
        assert (error <= before).all()
        before = error
        # and a logit's error is the product of the errors of its two vectors
        logits = (q @ matrix[:, None]) @ (k @ matrix)[:, :, None].mT - q @ k[:, :, None].mT
        assert (logits.square().sum((0, 2, 3, 4)).sqrt() <= left_out / 2 + 1e-9).all()


@laws
@given(st.integers(0, 1000))
def test_no_other_basis_of_that_rank_loses_less(seed: int) -> None:
    rows = stacked(*samples(seed))
    other = torch.linalg.qr(torch.randn(H, D, D, dtype=F64)).Q[..., :3]
    ours = basis(rotation(Moments.of(rows)), torch.full((H,), 3), F64).matrix
    lost = [(rows - rows @ m @ m.mT).square().sum((1, 2)) for m in (ours, other)]
    assert (lost[0] <= lost[1]).all()


@laws
@given(st.lists(st.integers(0, L), max_size=4))
def test_a_stream_gives_what_one_batch_gives(tier_thresholds: list[int]) -> None:
    k, q = samples()
    edges = [0, *sorted(tier_thresholds), L]
    parts = [slice(a, b) for a, b in pairwise(edges)]
    moments = Moments(torch.zeros(H, D, D, dtype=F64), 0)
    for part in parts:
        moments = moments + of_tokens(k[:, :, part]) + of_queries(q[:, :, :, part])
    whole = of_tokens(k) + of_queries(q)
    assert moments.rows == whole.rows == B * L * (1 + G)
    torch.testing.assert_close(moments.total, whole.total, rtol=1e-12, atol=1e-12)
    for found, expected in zip(
        vars(rotation(moments)).values(), vars(rotation(whole)).values(), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)


def test_padding_is_left_out() -> None:
    k, q = samples()
    there = torch.arange(L) >= torch.tensor([[0], [11]])
    k[1, :, :11], q[1, :, :, :11] = torch.nan, torch.inf
    moments = of_tokens(k, there) + of_queries(q, there)
    apart = of_tokens(k[:1]) + of_tokens(k[1:, :, 11:])
    apart = apart + of_queries(q[:1]) + of_queries(q[1:, :, :, 11:])
    assert moments.rows == apart.rows
    torch.testing.assert_close(moments.total, apart.total)


def test_bfloat16_samples_are_added_up_in_float64() -> None:
    ones = torch.ones(1, 1, 1000, 2, dtype=torch.bfloat16)
    moments = of_tokens(ones)
    assert moments.total.dtype == F64
    assert (moments.total == 1000).all()


@laws
@given(
    st.lists(st.lists(st.floats(1e-3, 1e3), min_size=6, max_size=6), min_size=1, max_size=4),
    st.floats(0, 0.999),
    st.sampled_from([1, 2, 4, 16]),
)
def test_ranks_follow_equation_6(values: list[list[float]], removal: float, multiple: int) -> None:
    singular = torch.tensor(values, dtype=F64).sort(-1, descending=True).values
    slack = 1e-12
    for s, exact, rounded in zip(
        singular, ranks(singular, removal), ranks(singular, removal, multiple), strict=True
    ):
        total, rank = s.sum(), int(exact)
        assert s[rank:].sum() / total <= removal + slack
        assert rank == 1 or s[rank - 1 :].sum() / total > removal - slack
        assert rounded == min(6, -(-rank // multiple) * multiple)


def test_a_shared_rate_gives_ranks_of_their_own() -> None:
    singular = torch.tensor([[[9.0, 0.5, 0.3, 0.2], [3, 3, 3, 1]]], dtype=F64)
    assert ranks(singular, 0.1).tolist() == [[1, 3]]
    assert ranks(singular, 0).tolist() == [[4, 4]]
    assert ranks(torch.zeros(2, 4, dtype=F64), 0.5).tolist() == [1, 1]


def test_each_head_is_cut_to_its_rank() -> None:
    found = rotation(Moments.of(stacked(*samples())))
    cut = basis(found, torch.tensor([2, 5, 1]))
    assert cut.rank == (2, 5, 1)
    assert cut.matrix.shape == (H, D, 5)
    assert cut.matrix.dtype == torch.float32
    assert (cut.matrix != 0).any(1).sum(-1).tolist() == [2, 5, 1]


def test_bad_input_is_refused() -> None:
    k, _ = samples()
    with pytest.raises(ValueError, match="cannot be fitted without samples"):
        rotation(of_tokens(k[:, :, :0]))
    k[0, 0, 3, 1] = torch.nan
    with pytest.raises(ValueError, match="the samples contain an infinity or NaN"):
        rotation(of_tokens(k))
    with pytest.raises(ValueError, match="cannot be added; heads and dimensions must be equal"):
        of_tokens(k) + of_tokens(k[..., :4])
    with pytest.raises(ValueError, match="has 50 columns; 3 KV heads of 8 dimensions need a"):
        of_output(torch.randn(HIDDEN, 50), H, D)
    for removal in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="it must be at least 0 and below 1"):
            ranks(torch.ones(1, 4, dtype=F64), removal)
    with pytest.raises(ValueError, match="ranks cannot be multiples of 0"):
        ranks(torch.ones(1, 4, dtype=F64), 0.1, 0)
