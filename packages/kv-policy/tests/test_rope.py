"""A rotation of pairs of dimensions, compared with its explicit matrix."""

import math

import pytest
import torch
from torch import Tensor

from kv_policy import CacheShape, Rope, Ropes
from kv_policy.shape import turns_by_dimension

ROPES = {
    "halves": Rope((1.0, 0.3, 0.05)),
    "neighbours": Rope((1.0, 0.3, 0.05), ((0, 1), (2, 3), (4, 5))),
    "reversed": Rope((1.0, 0.3, 0.05), ((3, 0), (4, 1), (5, 2))),
    "some": Rope((0.7,), ((4, 2),)),
    "none": Rope((), ()),
}


def matrix(rope: Rope, place: int) -> Tensor:
    found = torch.eye(6, dtype=torch.float64)
    pairs = rope.pairs if rope.pairs is not None else ((0, 3), (1, 4), (2, 5))
    for (i, j), frequency in zip(pairs, rope.frequencies, strict=True):
        cos, sin = math.cos(place * frequency), math.sin(place * frequency)
        found[i, i], found[i, j], found[j, i], found[j, j] = cos, -sin, sin, cos
    return found


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_vectors_are_turned_as_the_matrix_turns_them(rope: Rope) -> None:
    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1)).double()
    places = [0, 1, 7, -3]
    found = rope.turned(x, torch.tensor(places))
    for i, place in enumerate(places):
        torch.testing.assert_close(
            found[:, i], x[:, i] @ matrix(rope, place).T, rtol=1e-5, atol=1e-5
        )
    back = rope.turned(found, -torch.tensor(places))
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-5)
    mean = torch.stack([matrix(rope, place) for place in places]).mean(0)
    turn = rope.mean_turn(torch.tensor([places]), 6)
    torch.testing.assert_close(turn[0].double(), mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("together", [False, True])
def test_kernels_get_what_each_dimension_rotates_by(together: bool) -> None:
    every = tuple(ROPES.values())
    x = torch.randn(6, generator=torch.Generator().manual_seed(2))
    for i, rope in enumerate(every):
        given = Ropes(every) if together else rope
        rows = turns_by_dimension(given, 6, torch.device("cpu"))
        assert all(len(each) == (len(every) if together else 1) for each in rows)
        frequency, partner, sign = (each[i if together else 0] for each in rows)
        angle = 7 * frequency
        found = x * angle.cos() - sign * angle.sin() * x[partner]
        right = x.double() @ matrix(rope, 7).T
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_together_is_refused() -> None:
    for frequencies, pairs in (((1.0,), ()), ((1.0, 0.1), ((0, 1), (1, 2)))):
        with pytest.raises(ValueError, match="do not fit together"):
            Rope(frequencies, pairs)
    with pytest.raises(ValueError, match="2 rotary embeddings are given for 3 layers"):
        CacheShape(3, 1, 1, 6, 6, rope=Ropes((Rope(()), Rope(()))))


def test_layers_may_have_their_own() -> None:
    one, other = ROPES["halves"], ROPES["none"]
    assert CacheShape(2, 1, 1, 6, 6, rope=Ropes((one, other))).rope_of(1) is other
    assert CacheShape(2, 1, 1, 6, 6, rope=one).rope_of(1) is one
    assert CacheShape(2, 1, 1, 6, 6).rope_of(1) is None


def test_rows_are_turned_by_the_embedding_of_their_layer() -> None:
    ropes = tuple(ROPES.values())
    shape = CacheShape(len(ropes), 1, 1, 6, 6, rope=Ropes(ropes))
    x = torch.randn(4, 2, 3, 6, generator=torch.Generator().manual_seed(1))
    position, layer = torch.tensor([0, 7, 90]), torch.tensor([2, 0, 1, 4])
    turned = shape.turned(x, position.expand(4, 1, 3), layer)
    norms = shape.pair_norms(x, layer)
    for row, index in enumerate(layer.tolist()):
        torch.testing.assert_close(turned[row], ropes[index].turned(x[row], position))
        torch.testing.assert_close(norms[row], ropes[index].pair_norms(x[row]))
    alone = CacheShape(2, 1, 1, 6, 6, rope=ropes[0])
    torch.testing.assert_close(
        alone.turned(x, position.expand(4, 1, 3), layer), ropes[0].turned(x, position)
    )
    with pytest.raises(ValueError, match="rotary embedding is unknown"):
        CacheShape(2, 1, 1, 6, 6).turned(x, position.expand(4, 1, 3), layer)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_rotations_keep_the_norms_of_pairs(rope: Rope) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    norms = rope.pair_norms(x)
    torch.testing.assert_close(norms, rope.pair_norms(rope.turned(x, torch.tensor([0, 1, 7, 99]))))
    right = x.abs() * 2**0.5
    for i, j in rope.pairs if rope.pairs is not None else ((0, 3), (1, 4), (2, 5)):
        right[:, [i, j]] = torch.linalg.vector_norm(x[:, [i, j]], dim=-1, keepdim=True)
    torch.testing.assert_close(norms, right)


def test_angles_do_not_take_the_default_dtype() -> None:
    rope = Rope((0.123456789, 0.3, 0.05))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as vLLM does while it loads a model
    try:
        found = rope.turned(torch.ones(1, 6, dtype=torch.float32), torch.tensor([1001]))
    finally:
        torch.set_default_dtype(before)
    angle = 1001 * 0.123456789
    assert found[0, 0].item() == pytest.approx(math.cos(angle) - math.sin(angle), abs=1e-3)
