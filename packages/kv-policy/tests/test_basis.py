"""A basis with a rank per head: attention in the reduced space, and values folded into weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from kv_policy import HeadBasis, LayerBasis, fold_values

H, G, D, HIDDEN, L = 2, 3, 8, 12, 7
F64 = torch.float64


def rotations(heads: int, dim: int) -> Tensor:
    return torch.linalg.qr(torch.randn(heads, dim, dim, dtype=F64)).Q


def attend(q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Tensor:
    """Causal attention of one sequence: q is H G L d, k and v are H L d, o is hidden by HGd."""
    logits = q @ k[:, None].mT * D**-0.5
    masked = logits.masked_fill(torch.ones(L, L).triu(1).bool(), -torch.inf)
    out = masked.softmax(-1) @ v[:, None]  # H G L d
    return out.permute(2, 0, 1, 3).reshape(L, -1) @ o.mT


def toy(group: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x = torch.randn(L, HIDDEN, dtype=F64)
    q = torch.randn(H, group, L, D, dtype=F64)
    k = torch.randn(H, L, D, dtype=F64)
    v_proj = torch.randn(H * D, HIDDEN, dtype=F64)
    o_proj = torch.randn(HIDDEN, H * group * D, dtype=F64)
    return x, q, k, v_proj, o_proj


def values(x: Tensor, v_proj: Tensor) -> Tensor:
    return (x @ v_proj.mT).unflatten(-1, (H, -1)).transpose(0, 1)


@pytest.mark.parametrize("group", [1, G])
def test_full_rank_is_exact(group: int) -> None:
    x, q, k, v_proj, o_proj = toy(group)
    full = attend(q, k, values(x, v_proj), o_proj)
    layer = LayerBasis(HeadBasis(rotations(H, D), (D,) * H), HeadBasis(rotations(H, D), (D,) * H))
    assert layer.key is not None
    assert layer.value is not None
    folded_v, folded_o = fold_values(layer.value, v_proj, o_proj)
    rotated = attend(
        layer.key.project_queries(q[None])[0],
        layer.key.project(k[None])[0],
        values(x, folded_v),
        folded_o,
    )
    torch.testing.assert_close(rotated, full, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(folded_v, v_proj)


def test_a_rank_per_head_is_exact_where_vectors_need_no_more() -> None:
    """Each head's vectors span a subspace of its own; its rank is that subspace's dimension."""
    x, q, k, v_proj, o_proj = toy(G)
    rank = (3, 6)
    inside = torch.arange(D) < torch.tensor(rank)[:, None]  # H D
    matrix = rotations(H, D) * inside[:, None]
    projector = matrix @ matrix.mT
    k = k @ projector
    v_proj = (projector @ v_proj.view(H, D, HIDDEN)).flatten(0, 1)
    basis = HeadBasis(matrix[..., :6], rank)  # 6 columns: the maximum rank
    folded_v, folded_o = fold_values(basis, v_proj, o_proj)
    assert folded_v.shape == (H * 6, HIDDEN)
    assert folded_o.shape == (HIDDEN, H * G * 6)
    assert (folded_v.view(H, 6, HIDDEN)[0, 3:] == 0).all()  # never stored
    reduced = attend(
        basis.project_queries(q[None])[0], basis.project(k[None])[0], values(x, folded_v), folded_o
    )
    full = attend(q, k, values(x, v_proj), o_proj)
    torch.testing.assert_close(reduced, full, rtol=1e-12, atol=1e-12)


def test_folding_keeps_the_weights_dtype() -> None:
    _, _, _, v_proj, o_proj = (t.bfloat16() for t in toy(G))
    basis = HeadBasis(rotations(H, D).float(), (D,) * H)
    folded_v, folded_o = fold_values(basis, v_proj, o_proj)
    assert folded_v.dtype == folded_o.dtype == torch.bfloat16


def test_a_shard_of_heads_folds_as_in_the_whole() -> None:
    _, _, _, v_proj, o_proj = toy(G)
    matrix = rotations(H, D)
    folded_v, folded_o = fold_values(HeadBasis(matrix, (D,) * H), v_proj, o_proj)
    shard = HeadBasis(matrix[1:], (D,))
    v, o = fold_values(shard, v_proj[D:], o_proj[:, G * D :])
    torch.testing.assert_close(v, folded_v[D:])
    torch.testing.assert_close(o, folded_o[:, G * D :])


@pytest.mark.parametrize("rank", [(8,), (8, 0), (8, 9), (8, 8, 8)])
def test_ranks_that_do_not_fit_are_refused(rank: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="do not fit 2 heads of 8 dimensions"):
        HeadBasis(rotations(2, 8), rank)


def test_columns_past_the_rank_must_be_zero() -> None:
    with pytest.raises(ValueError, match="columns past a head's rank must be zero"):
        HeadBasis(rotations(2, 8), (8, 5))


def test_weights_of_another_model_are_refused() -> None:
    _, _, _, v_proj, o_proj = toy(G)
    basis = HeadBasis(rotations(3, D), (D,) * 3)
    with pytest.raises(ValueError, match="3 heads of 8 dimensions needs 24 rows"):
        fold_values(basis, v_proj, o_proj)


def test_a_dual_meets_what_the_matrix_stores() -> None:
    """Any pair A, B with A·Bᵀ = 1 preserves logits and output."""
    x, q, k, v_proj, o_proj = toy(G)
    a = torch.randn(H, D, D, dtype=F64)
    basis = HeadBasis(a, (D,) * H, dual=a.inverse().mT)
    folded_v, folded_o = fold_values(basis, v_proj, o_proj)
    changed = attend(
        basis.project_queries(q[None])[0], basis.project(k[None])[0], values(x, folded_v), folded_o
    )
    torch.testing.assert_close(changed, attend(q, k, values(x, v_proj), o_proj))
    v = values(x, v_proj)
    torch.testing.assert_close(basis.undo(basis.project(v[None])[:, :, None])[0, :, 0], v)


def test_heads_that_are_stored_together() -> None:
    """Two KV heads as one of 2·D dimensions: the same attention, with one stored vector."""
    x, q, k, v_proj, o_proj = toy(G)
    joint = torch.linalg.qr(torch.randn(H * D, H * D, dtype=F64)).Q.view(H, D, H * D)
    basis = HeadBasis(joint, (H * D,), together=H)
    v = values(x, v_proj)[None]
    keys, stored, queries = basis.project(k[None]), basis.project(v), basis.project_queries(q[None])
    assert keys.shape == stored.shape == (1, 1, L, H * D)
    assert queries.shape == (1, 1, H * G, L, H * D)
    logits = (queries @ keys[:, :, None].mT).unflatten(2, (H, G))[0, 0]
    torch.testing.assert_close(logits, q @ k[:, None].mT)
    weights = logits.softmax(-1)
    out = basis.undo((weights.flatten(0, 1) @ stored[0, 0])[None, None])
    torch.testing.assert_close(out[0], weights @ v[0][:, None])
    folded_v, folded_o = fold_values(basis, v_proj, o_proj)
    torch.testing.assert_close((x @ folded_v.mT)[None, None], stored)
    read = (weights.flatten(0, 1) @ stored[0, 0]).transpose(0, 1).flatten(1) @ folded_o.mT
    torch.testing.assert_close(read, out[0].flatten(0, 1).transpose(0, 1).flatten(1) @ o_proj.mT)


def test_what_is_stored_together_must_divide_the_heads() -> None:
    with pytest.raises(ValueError, match="3 KV heads cannot be stored 2 at a time"):
        HeadBasis(rotations(3, D), (D,), together=2)
    with pytest.raises(ValueError, match="keys of 1 KV heads are stored together and values of 2"):
        LayerBasis(HeadBasis(rotations(2, D), (D, D)), HeadBasis(rotations(2, D), (D,), together=2))


@pytest.mark.parametrize("together", [1, 2])
def test_a_shift_moves_all_logits_of_a_query_by_the_same_number(together: int) -> None:
    shift = torch.randn(H, D, dtype=F64)
    matrix = torch.randn(H, D, D * together, dtype=F64)
    basis = HeadBasis(matrix, (D * together,) * (H // together), None, together, shift)
    plain = HeadBasis(matrix, basis.rank, None, together)
    k = torch.randn(3, H, L, D, dtype=F64)
    q = torch.randn(3, H, G, 4, D, dtype=F64)
    asked = basis.project_queries(q)
    torch.testing.assert_close(asked, plain.project_queries(q))
    moved = asked @ (plain.project(k) - basis.project(k))[:, :, None].mT
    torch.testing.assert_close(moved, moved[..., :1].expand_as(moved))
    assert moved.abs().max() > 0.1


def test_one_matrix_for_all_heads_gives_what_each_would() -> None:
    matrix, x = torch.randn(1, D, D), torch.randn(2, H, L, D)
    one = HeadBasis(matrix.expand(H, -1, -1), (D,) * H)
    each = HeadBasis(matrix.repeat(H, 1, 1), (D,) * H)
    q = torch.randn(2, H, G, L, D)
    for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 0.05), (F64, 1e-6)):
        moved = one.to(torch.device("cpu"), dtype)
        for ours, theirs in (
            (moved.project(x.to(dtype)), each.project(x.to(dtype))),
            (moved.project_queries(q.to(dtype)), each.project_queries(q.to(dtype))),
            (moved.undo(q.to(dtype)), each.undo(q.to(dtype))),
        ):
            assert ours.dtype == dtype
            torch.testing.assert_close(ours, theirs, rtol=near, atol=near)
    assert one.nbytes * H == each.nbytes
    assert one.to(torch.device("cpu"), torch.float32).nbytes == one.nbytes


def test_only_keys_may_have_a_shift() -> None:
    matrix, rank = rotations(H, D), (D,) * H
    shifted = HeadBasis(matrix, rank, shift=torch.zeros(H, D))
    assert LayerBasis(shifted).key is shifted
    with pytest.raises(ValueError, match="values have a shift; only keys may have one"):
        LayerBasis(None, shifted)


@settings(deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.booleans())
def test_truncation_cuts_vectors_and_pads_outputs(dim: int, found: list[int], wider: bool) -> None:
    rank = tuple(min(each, dim) for each in found)
    basis = HeadBasis.truncating(dim, rank)
    if wider:
        basis = HeadBasis(pad(basis.matrix, (0, 2)), rank)
    assert basis.truncates
    x = torch.randn(2, len(rank), 3, dim)
    stored = basis.project(x)
    for head, kept in enumerate(rank):
        assert torch.equal(stored[:, head, :, :kept], x[:, head, :, :kept])
        assert not stored[:, head, :, kept:].any()
    back = basis.undo(stored[:, :, None])[:, :, 0]
    assert torch.equal(back[..., : max(rank)], stored[..., : max(rank)])
    assert not back[..., max(rank) :].any()


def test_other_maps_do_not_truncate() -> None:
    basis = HeadBasis.truncating(D, (3, 5))
    swapped = basis.matrix.flip(1)
    for other in (
        HeadBasis(swapped, basis.rank),
        HeadBasis(2 * basis.matrix, basis.rank),
        HeadBasis(basis.matrix, basis.rank, 2 * basis.matrix),
        HeadBasis(basis.matrix, basis.rank, shift=torch.zeros(2, D)),
        HeadBasis(torch.eye(D).expand(2, -1, -1), (D,), together=2),
        HeadBasis(rotations(2, D), (D, D)),
    ):
        assert not other.truncates
