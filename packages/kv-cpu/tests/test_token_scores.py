"""The scores of kv-evict's gate in native code, compared with torch and with float64."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gate_cases import exact, gate_of, of_model, rope_of, view_of
from kv_cpu import token_scores
from kv_evict.gate_kernels import kernels_of
from kv_policy import CacheShape, Rope, Ropes

CPU = torch.device("cpu")
KINDS = ["halves", "neighbours", "part", "part of halves", "none"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NEAR = {"rtol": 1e-5, "atol": 1e-5}  # of a sum of hundreds of products in float32


def native(gate, view):
    """Return what native code computes, and nothing else."""
    network = gate.on(CPU)
    assert token_scores.declined(view, gate.facts.units) is None
    return token_scores.gate(view, network.linear, network.inner, network.outer)


def check(gate, view, **near):
    found, right = native(gate, view), exact(gate, view)
    torch.testing.assert_close(found.double(), right, **(NEAR | near))
    torch.testing.assert_close(found, gate.logarithm(view), **(NEAR | near))
    scores = right.clamp(max=0).exp().float()
    torch.testing.assert_close(gate.score(view), scores, rtol=2e-5, atol=1e-6)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 99),
    dims=st.tuples(*[st.integers(1, 70)] * 2),
    units=st.sampled_from([0, 1, 3, 16, 17, 33]),
    layers=st.lists(st.integers(0, 2), min_size=1, max_size=4),
    heads=st.integers(1, 3),
    tokens=st.integers(0, 30),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
)
def test_any_sizes(isa, seed, dims, units, layers, heads, tokens, kind, dtype):
    shape = CacheShape(3, heads, 1, *dims, rope=rope_of(dims[0], kind))
    check(gate_of(shape, units, seed=seed), view_of(shape, layers, tokens, dtype, seed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("units", [0, 1, 16, 33])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_heads_of_models(isa, dim, units, dtype):
    shape = CacheShape(1, 2, 1, dim, dim, rope=rope_of(dim))
    check(gate_of(shape, units), view_of(shape, [0], 37, dtype))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("layers", [[0], [1, 0]], ids=str)
def test_prompts_in_several_tasks(isa, layers, threads):
    shape = CacheShape(2, 3, 1, 64, 64, rope=rope_of(64))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(gate_of(shape, 16), view_of(shape, layers, 401, torch.bfloat16))
    finally:
        torch.set_num_threads(before)


def test_the_number_of_threads_changes_no_bit(isa):
    shape = CacheShape(1, 2, 1, 64, 64, rope=rope_of(64))
    gate, view = gate_of(shape, 16), view_of(shape, [0], 400)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(native(gate, view))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("units", [0, 16, 17])
def test_other_tokens_change_no_bit(isa, units):
    shape = CacheShape(2, 2, 1, 64, 20, rope=rope_of(64))
    gate, view = gate_of(shape, units), view_of(shape, [1, 0], 110, torch.bfloat16)
    whole = native(gate, view)
    assert view.keys is not None
    assert view.values is not None
    for first, last in ((0, 1), (5, 8), (9, 24), (3, 99)):
        some = (slice(None), slice(None), slice(first, last))
        vectors = {"keys": view.keys[some], "values": view.values[some]}
        noted = {"score": view.score[some], "fresh": view.fresh[some]}
        part = replace(view, position=view.position[some], **vectors, **noted)
        assert torch.equal(native(gate, part), whole[some])


def test_a_decode_step_of_all_layers(isa):
    shape = CacheShape(30, 3, 1, 64, 64, rope=rope_of(64))
    layers = [layer for layer in range(30) for _ in range(2)]
    check(gate_of(shape, 16), view_of(shape, layers, 1, torch.bfloat16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [10**6, 2**24 + 1, 2**31, 2**40, 2**62])
def test_distant_positions(isa, kind, place):
    shape = CacheShape(1, 2, 1, 8, 8, rope=rope_of(8, kind))
    view = view_of(shape, [0], 40, most=1000)
    far = (place - view.position.clamp(min=0)).expand(view.position.shape)
    check(gate_of(shape, 4), replace(view, position=far))


def test_angles_are_accurate(isa):
    """Each feature alone, over all angles that float32 has room for."""
    shape = CacheShape(1, 1, 1, 2, 1, rope=Rope((1.0,)))
    gate = gate_of(shape, 0)
    view = view_of(shape, [0], 20_000, most=10**6)
    for feature in range(2):
        gate.network.linear.zero_()
        gate.network.linear[0, 0, feature] = 1
        one = replace(gate, network=gate.network)  # its weights are cached otherwise
        error = native(one, view).double() - exact(one, view)
        assert view.keys is not None
        assert float((error.abs() / view.keys.norm(dim=-1)).max()) < 3e-7


def test_positions_that_differ_between_heads(isa):
    shape = CacheShape(1, 3, 1, 16, 8, rope=rope_of(16))
    view = view_of(shape, [0, 0], 130)
    own = torch.randint(-1, 900, view.position.shape, generator=torch.Generator().manual_seed(2))
    for position in (own, own.int(), own.transpose(1, 2).contiguous().transpose(1, 2)):
        check(gate_of(shape, 5), replace(view, position=position))


def test_layers_with_their_own_rotations(isa):
    ropes = Ropes(tuple(rope_of(16, kind) for kind in KINDS))
    shape = CacheShape(len(KINDS), 2, 1, 16, 16, rope=ropes)
    check(gate_of(shape, 7), view_of(shape, [4, 0, 1, 1, 2, 3, 0], 15))


def test_layers_without_any_rotation(isa):
    shape = CacheShape(2, 2, 1, 16, 16, rope=Ropes((Rope(()), Rope(()))))
    check(gate_of(shape, 7), view_of(shape, [0, 1], 15))


def test_a_shard_of_heads_has_its_own_weights(isa):
    shape = CacheShape(2, 5, 1, 16, 16, rope=rope_of(16))
    gate, view = gate_of(shape, 16), view_of(shape, [1, 0], 20)
    whole = native(gate, view)
    for first, heads in ((0, 2), (2, 3), (4, 1)):
        part = of_model(view, first, heads)
        check(gate, part)
        assert torch.equal(native(gate, part), whole[:, first : first + heads])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_of_larger_tensors(isa, dtype):
    shape = CacheShape(1, 2, 1, 24, 16, rope=rope_of(24))
    gate, view = gate_of(shape, 16), view_of(shape, [0, 0], 30, dtype)
    assert view.keys is not None
    assert view.values is not None
    right = native(gate, view)
    by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (view.keys, view.values)]
    wide = torch.cat((view.keys, view.values), -1)
    parts = [wide[..., :24], wide[..., 24:]]
    every_other = [torch.stack((x, x), -1).flatten(-2)[..., ::2] for x in (view.keys, view.values)]
    by_head = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (view.keys, view.values)]
    for keys, values in (by_token, parts, every_other, by_head):
        assert torch.equal(native(gate, replace(view, keys=keys, values=values)), right)
    one = [x[:1, :1].expand(2, 2, -1, -1) for x in (view.keys, view.values)]
    check(gate, replace(view, keys=one[0], values=one[1]))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_empty_slots_hold_concerns_no_other_token(isa, bad):
    shape = CacheShape(1, 2, 1, 16, 16, rope=rope_of(16))
    gate, view = gate_of(shape, 17), view_of(shape, [0, 0], 29)
    right, empty = native(gate, view), view.position < 0
    empty[:, :, ::5] = True
    assert view.keys is not None
    assert view.values is not None
    spoilt = [x.masked_fill(empty[..., None], bad) for x in (view.keys, view.values)]
    found = native(gate, replace(view, keys=spoilt[0], values=spoilt[1]))
    assert torch.equal(found[~empty], right[~empty])
    if bad != bad:
        assert bool(found[empty].isnan().all())  # as in torch


def test_infinite_vectors_score_as_in_torch(isa):
    shape = CacheShape(1, 2, 1, 16, 16, rope=rope_of(16, "none"))
    view = view_of(shape, [0], 29)
    assert view.keys is not None
    view.keys[..., 3, 2] = torch.inf
    for units in (1, 16, 17):
        gate = gate_of(shape, units)
        torch.testing.assert_close(native(gate, view), gate.logarithm(view), equal_nan=True, **NEAR)


@pytest.mark.parametrize("layers", [[], [0], [0, 0]], ids=str)
@pytest.mark.parametrize("tokens", [0, 3])
def test_no_tokens(isa, layers, tokens):
    shape = CacheShape(1, 2, 1, 16, 8, rope=rope_of(16))
    view = view_of(shape, layers, tokens)
    assert native(gate_of(shape, 16), view).shape == (len(layers), 2, tokens)
    assert gate_of(shape, 16).score(view).shape == (len(layers), 2, tokens)


def test_the_gate_uses_native_code():
    """Fail if scores fall back to torch without a reason."""
    shape = CacheShape(1, 2, 1, 16, 16, rope=rope_of(16))
    gate, view = gate_of(shape, 16), view_of(shape, [0], 9)
    assert kernels_of(view, gate.on(CPU), gate.logarithm) is token_scores
    with patch.object(token_scores, "gate", wraps=token_scores.gate) as spy:
        gate.score(view)
    assert spy.call_count == 1


def test_what_native_code_does_not_support_goes_to_torch():
    shape = CacheShape(1, 2, 1, 16, 16, rope=rope_of(16))
    gate, view = gate_of(shape, 16), view_of(shape, [0], 9)
    assert view.keys is not None
    double = replace(view, keys=view.keys.double())
    assert token_scores.declined(double, 16) == "vectors in torch.float64"
    assert kernels_of(double, gate.on(CPU), gate.logarithm) is None
    torch.testing.assert_close(gate.score(double), gate.score(view))
    assert token_scores.declined(view, 4097) == "a hidden layer of more than 4096 units"
    wide = CacheShape(1, 2, 1, 1026, 16, rope=rope_of(1026))
    reason = "vectors of more than 1024 dimensions"
    assert token_scores.declined(view_of(wide, [0], 1), 1) == reason
    on_meta = replace(view, keys=view.keys.to("meta"))
    assert token_scores.declined(on_meta, 16) == "tensors on meta"
    unknown = replace(view, shape=replace(shape, rope=None))
    assert "unknown rotary embedding" in str(token_scores.declined(unknown, 16))
    with pytest.raises(ValueError, match="the rotary embedding is unknown"):
        gate.score(unknown)


def test_an_instruction_set_that_is_not_there_leaves_scores_to_torch(monkeypatch):
    shape = CacheShape(1, 2, 1, 16, 16, rope=rope_of(16))
    gate, view = gate_of(shape, 16), view_of(shape, [0], 9)
    right = gate.score(view)
    monkeypatch.setenv("KV_CPU_ISA", "sparc")
    assert kernels_of(view, gate.on(CPU), gate.logarithm) is None
    torch.testing.assert_close(gate.score(view), right)


def test_arguments_that_do_not_fit_are_errors():
    shape = CacheShape(2, 2, 1, 16, 16, rope=rope_of(16))
    gate, view = gate_of(shape, 16), view_of(shape, [0], 9)
    beyond = replace(view, layer=torch.tensor([2]))
    with pytest.raises(RuntimeError, match="a layer is 2; it must be 0 to 1"):
        native(gate, beyond)
    shard = replace(view, shape=replace(shape, first_head=1))
    with pytest.raises(RuntimeError, match="key has 2 heads from head 1 on; there are weights for"):
        native(gate, shard)
    other = replace(shape, rope=Rope((1.0,), ((3, 16),)))
    with pytest.raises(RuntimeError, match="a dimension of a pair is 16; it must be 0 to 15"):
        native(gate, replace(view, shape=other))
