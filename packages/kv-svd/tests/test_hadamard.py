"""The rotation before a codec: attention is unchanged, at any width and from any file."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kv_policy import CacheShape, LayerBasis, NotCalibratedError, keeps_shape, parse
from kv_policy.testing import check_policy
from kv_svd import Hadamard, LayerStatistics, load, save
from kv_svd.hadamard import rotation_of

OTHERS = ("hadamard:file={}", "hadamard:file={},pair=true")
SPECS = ("hadamard", *OTHERS)
each = pytest.mark.parametrize("spec", SPECS)


def attention(basis: LayerBasis, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over coordinates; q is B H G L D, k and v are B H L D."""
    assert basis.key is not None
    assert basis.value is not None
    keys, values = basis.key.project(k), basis.value.project(v)
    logits = basis.key.project_queries(q) @ keys[:, :, None].mT
    return basis.value.undo(logits.softmax(-1) @ values[:, :, None])


def vectors(made, layer: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return made.query[layer], made.key[layer], made.value[layer]


@each
def test_it_follows_the_contract(spec: str, made, file: Path) -> None:
    policy = parse(spec.format(file))
    assert isinstance(policy, Hadamard)
    check_policy(policy, made.shape)
    assert keeps_shape(policy.basis)
    assert policy.fitted_to == (None if spec == "hadamard" else "0123456789abcdef")
    assert all(parameter.doc for parameter in policy.parameters())


@pytest.mark.parametrize(("key_dim", "value_dim"), [(80, 33), (7, 1), (96, 112)])
def test_widths_that_are_no_powers_of_two_follow_the_contract(key_dim: int, value_dim: int) -> None:
    check_policy(parse("hadamard"), CacheShape(2, 4, 3, key_dim, value_dim))


@each
def test_attention_is_unchanged(spec: str, made, file: Path) -> None:
    basis = parse(spec.format(file)).basis
    assert basis is not None
    for layer in range(made.shape.layers):
        q, k, v = vectors(made, layer)
        want = (q @ k[:, :, None].mT).softmax(-1) @ v[:, :, None]
        found = attention(basis.bind(layer, made.shape), q, k, v)
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    odd = replace(made.shape, key_dim=5, value_dim=3)
    if spec != "hadamard":
        with pytest.raises(ValueError, match="64 dimensions in a key, but this cache has 5"):
            basis.bind(0, odd)


@given(dim=st.integers(1, 130), heads=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_products_and_norms_stay(dim: int, heads: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(2, heads, 2, 3, dim, generator=draw).double()
    k = torch.randn(2, heads, 4, dim, generator=draw).double()
    turn = rotation_of(dim, heads)
    stored = turn.project(k)
    products = turn.project_queries(q) @ stored[:, :, None].mT
    torch.testing.assert_close(products, q @ k[:, :, None].mT, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stored.norm(dim=-1), k.norm(dim=-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(turn.undo(stored[:, :, None])[:, :, 0], k, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", OTHERS)
def test_stored_keys_of_the_calibrated_text_have_no_mean(spec: str, made, file: Path) -> None:
    basis = parse(spec.format(file)).basis
    assert basis is not None
    shifted = made.key + 5  # calibrated below
    path = file.parent / "shifted"
    replace(made, key=shifted).write(path, together=2)
    found = parse(spec.format(path)).basis
    assert found is not None
    for layer in range(made.shape.layers):
        key = found.bind(layer, made.shape).key
        assert key is not None
        mean = key.project(shifted[layer]).mean((0, 2))
        assert mean.abs().max() < 1e-4
        q = made.query[layer]
        exact = q @ shifted[layer][:, :, None].mT
        logits = key.project_queries(q) @ key.project(shifted[layer])[:, :, None].mT
        moved = exact - logits  # by one number per query
        assert (moved - moved.mean(-1, keepdim=True)).abs().max() < 1e-3 * exact.abs().max()
        assert moved.abs().max() > 0.1


def test_a_pair_leaves_all_coordinates_of_queries_and_keys_equally_large(made, file: Path) -> None:
    """Rounding errors of keys then count alike in every direction, so no channel stands out."""
    basis = parse(OTHERS[1].format(file)).basis
    assert basis is not None
    key = basis.bind(0, made.shape).key
    assert key is not None
    q, k, _ = vectors(made)
    stored = key.project(k)
    asked = key.project_queries(q).square().mean((0, 2, 3))
    kept = (stored - stored.mean((0, 2), keepdim=True)).square().mean((0, 2))
    even = kept.mean(-1, keepdim=True).expand_as(kept)
    torch.testing.assert_close(kept, even, rtol=1e-3, atol=0)
    torch.testing.assert_close(asked, even, rtol=1e-3, atol=0)


def test_all_heads_and_layers_share_a_matrix() -> None:
    shape = CacheShape(3, 4, 2, 64, 64)
    bound = [Hadamard().bind(layer, shape) for layer in range(3)]
    assert len({id(maps) for layer in bound for maps in (layer.key, layer.value)}) == 1
    assert bound[0].key is not None
    assert bound[0].key.nbytes == 4 * 64 * 64


def test_a_file_of_an_earlier_version_has_no_means(made, tmp_path: Path) -> None:
    path = made.write(tmp_path / "older")
    facts, found = load(path)
    older = tuple(replace(layer, key_sum=None) for layer in found)
    assert all(isinstance(layer, LayerStatistics) for layer in older)
    save(path, facts, replace(found, layers=older))
    assert load(path)[1].layers[0].key_sum is None
    assert parse(f"zack:file={path},rate=0.4").basis is not None
    policy = Hadamard(str(path))
    with pytest.raises(ValueError, match="was written without mean keys; calibrate again"):
        policy.bind(0, made.shape)


def test_what_is_refused_at_construction(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pair=true needs a model's statistics; add file="):
        Hadamard(pair=True)
    with pytest.raises(NotCalibratedError, match=r"hadamard: .*nowhere does not exist"):
        Hadamard(str(tmp_path / "nowhere"))
    (tmp_path / "damaged").write_text("nothing")
    with pytest.raises(ValueError, match="hadamard: "):
        Hadamard(str(tmp_path / "damaged"))
    with pytest.raises(ValueError, match="both define the basis in which vectors are stored"):
        parse("hadamard+hadamard")
