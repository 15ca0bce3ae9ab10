"""The scores of a gate in Triton, compared with torch and with float64."""

import logging
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from gate_cases import exact, gate_of, of_model, rope_of, view_of
from kv_evict import gate_triton
from kv_evict.gate_file import GateWeights
from kv_evict.gate_kernels import agrees, kernels_of
from kv_policy import CacheShape, LayerView, Ropes
from kv_policy.interpreter import SWITCH

pytestmark = [
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = ["halves", "neighbours", "part", "part of halves", "none"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NEAR = {"rtol": 1e-5, "atol": 1e-5}


def moved(view: LayerView) -> LayerView:
    names = ("layer", "position", "fresh", "score", "length", "keys", "values")
    return replace(view, **{name: getattr(view, name).to(DEVICE) for name in names})


def scored(gate: GateWeights, view: LayerView) -> Tensor:
    network, there = gate.on(DEVICE), moved(view)
    assert gate_triton.declined(there, gate.facts.units) is None
    return gate_triton.gate(there, network.linear, network.inner, network.outer).cpu()


def check(gate: GateWeights, view: LayerView) -> None:
    found = scored(gate, view)
    torch.testing.assert_close(found.double(), exact(gate, view), **NEAR)
    torch.testing.assert_close(found, gate.logarithm(view), **NEAR)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("dims", "units"), [((64, 64), 16), ((80, 33), 33), ((128, 128), 1), ((5, 256), 0)], ids=str
)
def test_heads_of_models(dims: tuple[int, int], units: int, dtype: torch.dtype) -> None:
    shape = CacheShape(2, 2, 1, *dims, rope=rope_of(dims[0]))
    check(gate_of(shape, units), view_of(shape, [1, 0], 37, dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_rotations(kind: str) -> None:
    shape = CacheShape(1, 2, 1, 16, 8, rope=rope_of(16, kind))
    check(gate_of(shape, 5), view_of(shape, [0], 40, most=10**6))


def test_layers_with_their_own_rotations() -> None:
    ropes = Ropes(tuple(rope_of(16, kind) for kind in KINDS))
    shape = CacheShape(len(KINDS), 2, 1, 16, 16, rope=ropes)
    check(gate_of(shape, 7), view_of(shape, [4, 0, 1, 1, 2, 3, 0], 3))


def test_a_decode_step_of_all_layers() -> None:
    shape = CacheShape(5, 3, 1, 64, 64, rope=rope_of(64))
    check(gate_of(shape, 16), view_of(shape, [0, 0, 1, 2, 3, 4], 1, torch.bfloat16))


def test_a_shard_of_heads_has_its_own_weights() -> None:
    shape = CacheShape(2, 3, 1, 16, 16, rope=rope_of(16))
    gate, view = gate_of(shape, 16), view_of(shape, [1, 0], 20)
    check(gate, of_model(view, 1, 2))


def test_positions_that_differ_between_heads_and_views_of_larger_tensors() -> None:
    shape = CacheShape(1, 3, 1, 16, 8, rope=rope_of(16))
    view = view_of(shape, [0, 0], 20)
    own = torch.randint(-1, 900, view.position.shape, generator=torch.Generator().manual_seed(2))
    gate = gate_of(shape, 5)
    check(gate, replace(view, position=own.int()))
    assert view.keys is not None
    assert view.values is not None
    keys = torch.stack((view.keys, view.keys), -1).flatten(-2)[..., ::2]
    values = view.values.transpose(1, 2).contiguous().transpose(1, 2)
    check(gate, replace(view, keys=keys, values=values, position=own))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_empty_slots_hold_concerns_no_other_token(bad: float) -> None:
    shape = CacheShape(1, 2, 1, 16, 16, rope=rope_of(16))
    gate, view = gate_of(shape, 17), view_of(shape, [0, 0], 29)
    right, empty = scored(gate, view), view.position < 0
    empty[:, :, ::5] = True
    assert view.keys is not None
    assert view.values is not None
    spoilt = [x.masked_fill(empty[..., None], bad) for x in (view.keys, view.values)]
    found = scored(gate, replace(view, keys=spoilt[0], values=spoilt[1]))
    assert torch.equal(found[~empty], right[~empty])


@pytest.mark.parametrize(("layers", "tokens"), [([], 3), ([0], 0)], ids=str)
def test_no_tokens(layers: list[int], tokens: int) -> None:
    shape = CacheShape(1, 2, 1, 16, 8, rope=rope_of(16))
    found = scored(gate_of(shape, 16), view_of(shape, layers, tokens))
    assert found.shape == (len(layers), 2, tokens)


def test_what_triton_does_not_support_goes_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = CacheShape(1, 2, 1, 16, 16, rope=rope_of(16))
    view = view_of(shape, [0], 2)
    assert view.keys is not None
    double = replace(view, keys=view.keys.double())
    assert gate_triton.declined(moved(double), 4) == "vectors in torch.float64"
    reason = "a hidden layer of more than 64 units"
    assert gate_triton.declined(moved(view), 65) == reason
    unknown = replace(view, shape=replace(shape, rope=None))
    assert "unknown rotary embedding" in str(gate_triton.declined(unknown, 4))
    monkeypatch.delenv(SWITCH, raising=False)
    assert gate_triton.declined(view, 4) == "tensors on cpu"


def test_scores_are_compared_with_those_of_torch_once(caplog: pytest.LogCaptureFixture) -> None:
    shape = CacheShape(3, 2, 1, 16, 8, rope=rope_of(16))
    gate = gate_of(shape, 5)
    network, right = gate.on(DEVICE), gate.logarithm
    with caplog.at_level(logging.WARNING, "kv_evict"):
        assert agrees(gate_triton, network, right, shape, torch.bfloat16)
        assert not caplog.records

        def wrong(view: LayerView, *weights: Tensor) -> Tensor:
            found = gate_triton.gate(view, *weights)
            found[1, 0, 5] = torch.nan
            return found

        def failing(view: LayerView, *weights: Tensor) -> Tensor:
            raise RuntimeError("no room")

        for code, reason in ((wrong, "1 of 198 scores differ"), (failing, "RuntimeError: no room")):
            kernels = ModuleType("kernels")
            kernels.gate, kernels.declined = code, gate_triton.declined
            for _ in range(2):
                assert not agrees(kernels, network, right, shape, torch.bfloat16)
            (record,) = caplog.records
            assert record.getMessage() == (
                f"torch computes the scores of a gate on {DEVICE}: {reason}"
            )
            caplog.clear()


def test_without_a_gpu_no_triton_is_used() -> None:
    shape = CacheShape(1, 2, 1, 16, 16, rope=rope_of(16))
    gate, view = gate_of(shape, 16), view_of(shape, [0], 2)
    kernels = kernels_of(view, gate.on(torch.device("cpu")), gate.logarithm)
    assert kernels is not gate_triton


@pytest.mark.gpu
def test_on_a_gpu_the_gate_uses_triton() -> None:
    shape = CacheShape(2, 2, 1, 16, 16, rope=rope_of(16))
    gate, view = gate_of(shape, 16), view_of(shape, [1], 30)
    assert kernels_of(moved(view), gate.on(DEVICE), gate.logarithm) is gate_triton
    torch.testing.assert_close(gate.score(moved(view)).cpu(), gate.score(view))
