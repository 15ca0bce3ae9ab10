"""Rotations are found from vectors at several positions, and frequencies from a model's buffers."""

import gc
import math

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleList, Sequential
from torch.nn.modules import module as torch_modules

from kv_policy import Rope, Ropes, compose, parse
from kv_runtime import (
    Outermost,
    find_rope,
    growing_kind,
    joined_ropes,
    model_frequencies,
    needs_rotation,
    probe_positions,
)
from tiered_policies import Turned

DIM = 8
FOUR = tuple(10000 ** (-i / 4) for i in range(4))
TWO = FOUR[::2]
PLACES = probe_positions(4095)
ROPES = {
    "halves": Rope(FOUR, tuple((i, i + 4) for i in range(4))),
    "neighbours": Rope(FOUR, tuple((2 * i, 2 * i + 1) for i in range(4))),
    "reversed": Rope(FOUR, tuple((i + 4, i) for i in range(4))),
    "the first dimensions": Rope(TWO, ((0, 2), (1, 3))),
    "the last dimensions": Rope(TWO, ((4, 5), (6, 7))),
    "none": Rope((), ()),
}


def vectors(rope: Rope, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return vectors of five tokens and three heads at all places, rotated in the dtype."""
    plain = torch.randn(5, 1, 3, DIM, generator=torch.Generator().manual_seed(0))
    return rope.turned(plain.to(dtype).float(), torch.tensor(PLACES)[:, None]).to(dtype)


def table(frequencies: tuple[float, ...], length: int, dtype: torch.dtype) -> Tensor:
    angle = torch.arange(length)[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    return torch.cat((angle.cos(), angle.sin()), dim=1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_a_rotation_is_found(rope: Rope, dtype: torch.dtype) -> None:
    assert find_rope(vectors(rope, dtype), PLACES, [TWO, FOUR]) == rope


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["halves", "the last dimensions"])
def test_other_frequencies_are_no_explanation(name: str, dtype: torch.dtype) -> None:
    slower = [tuple(0.9 * each for each in FOUR), tuple(0.9 * each for each in TWO)]
    assert find_rope(vectors(ROPES[name], dtype), PLACES, slower) is None
    assert find_rope(vectors(ROPES[name], dtype), PLACES, []) is None


def test_half_a_percent_is_told_apart_in_float32_alone() -> None:
    wrong = 1.005 * vectors(ROPES["halves"])
    wrong[:, 0] /= 1.005
    assert find_rope(wrong, PLACES, [FOUR]) is None
    assert find_rope(wrong.bfloat16(), PLACES, [FOUR]) == ROPES["halves"]


def test_vectors_that_grow_far_away_are_not_rotated() -> None:
    grown = vectors(ROPES["halves"])
    grown[:, -1] *= 1.1
    assert find_rope(grown, PLACES, [FOUR]) is None
    grown[0, -1, 0, 0] = math.nan
    assert find_rope(grown, PLACES, [FOUR]) is None


def test_places_end_with_the_last() -> None:
    assert probe_positions(4095) == (0, 1, 13, 101, 1009, 4095)
    assert probe_positions(101) == (0, 1, 13, 101)


def test_equal_layers_have_one_rotation() -> None:
    one, other = ROPES["halves"], ROPES["none"]
    assert joined_ropes([one, one]) == one
    assert joined_ropes([one, other]) == Ropes((one, other))


def test_policies_that_rotate() -> None:
    reads = parse("expected-attention:budget=20")
    assert needs_rotation(reads)
    assert not needs_rotation(compose(reads, Turned("4", "3")))
    assert not needs_rotation(parse("snapkv:budget=64"))
    assert not needs_rotation(parse("k8v4"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_angles_of_a_table_are_exact_at_every_position(dtype: torch.dtype) -> None:
    model = Module()
    model.register_buffer("cos_sin_cache", 1.2 * table(FOUR, 4096, dtype))  # scaled, as for YaRN
    (found,) = model_frequencies(model)
    exact = 1e-5 if dtype == torch.float32 else 0.005
    for mine, own in zip(found, FOUR, strict=True):
        assert abs(mine - own) * 4095 < exact


def test_frequencies_are_read_wherever_they_are_stored() -> None:
    model = Sequential(Module(), Module(), Module())
    model[0].register_buffer("inv_freq", torch.tensor(TWO, dtype=torch.float64))
    model[0].register_buffer("original_inv_freq", torch.ones(2))
    parts = [table(FOUR, 100, torch.float64), table(TWO + TWO, 300, torch.float64)]
    model[1].register_buffer("long_short_cos_sin_cache", torch.cat(parts))
    model[2].register_buffer("cos_sin_cache", table(TWO, 1, torch.float64))  # position 0 alone
    first, *both = model_frequencies(model)
    assert first == TWO
    assert both == [pytest.approx(FOUR), pytest.approx(TWO + TWO)]


def test_kinds_that_change_with_the_length_are_named() -> None:
    model = Sequential(Module(), Module())
    assert growing_kind(model) is None
    model[0].rope_type = "yarn"
    assert growing_kind(model) is None
    model[1].rope_type = {"full_attention": "default", "sliding_attention": "longrope"}
    assert growing_kind(model) == "longrope"
    model[0].rope_type = "dynamic"
    assert growing_kind(model) == "dynamic"


def hooks() -> int:
    return len(torch_modules._global_module_registration_hooks)


def test_the_model_around_a_layer_is_found_inside_out() -> None:
    before = hooks()
    layer = Linear(1, 1)
    search = Outermost(lambda each: each is layer)
    blocks = ModuleList([Sequential(Linear(1, 1)), Sequential(layer)])
    model = Module()
    model.blocks = blocks
    Module().head = Linear(1, 1)
    assert search.found() is model
    Module().model = model
    assert search.found() is model
    assert hooks() == before


def test_the_model_around_a_layer_is_found_if_the_layer_comes_last() -> None:
    layer = Linear(1, 1)
    model = Sequential(Sequential(Linear(1, 1), Linear(1, 1)))
    search = Outermost(lambda each: each is layer)
    model[0].attention = layer
    assert search._top is model[0]
    model.head = Linear(1, 1)
    assert search.found() is model
    assert Outermost(lambda each: each is layer).found() is None


def test_a_search_ends_with_its_owner() -> None:
    before = hooks()
    layer = Linear(1, 1)
    search = Outermost(lambda each: each is layer)
    model = Sequential(layer)
    model.search = search
    assert hooks() == before + 1
    del search, model
    gc.collect()
    assert hooks() == before
