"""Maps of a decode step on an engine's tensors, compared with products in float64."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_cases import Case
from kv_attention import Attended, RowInputs, RowMaps, TokenPlaces
from kv_cpu.rows import declined, decode_rows
from kv_policy import Observe, PageLayout, RawCodec, TokenFormat

BEFORE, AFTER = 2, 1  # rows of other tokens around those that decode
EPSILON: Final = {torch.float32: 0.0, torch.bfloat16: 2**-6, torch.float16: 2**-9}


@dataclass(frozen=True)
class Drawn:
    """What is drawn: dimensions before and after, and how the maps are held."""

    dims: tuple[int, int, int, int]  # of keys and values as given, and as stored
    sizes: tuple[int, int, int]  # B, H, G
    each: tuple[bool, ...]  # a matrix of each head: of keys, queries, values, outputs
    columns: tuple[bool, ...]  # which are held by columns
    dtype: torch.dtype  # of vectors
    held: torch.dtype  # of maps
    keys: bool
    values: bool
    shift: bool
    padding: bool
    seed: int


FLOATS = st.sampled_from((torch.float32, torch.bfloat16, torch.float16))
DRAWN = st.builds(
    Drawn,
    st.sampled_from(
        ((64, 64, 64, 64), (128, 128, 96, 64), (33, 17, 5, 40), (1, 3, 2, 1), (300, 260, 270, 257))
    ),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from((1, 2, 3, 5, 9))),
    st.tuples(*[st.booleans()] * 4),
    st.tuples(*[st.booleans()] * 4),
    FLOATS,
    FLOATS,
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**16),
)


def maps_of(drawn: Drawn) -> RowMaps | None:
    """Draw matrices that keep the length of vectors about the same."""
    (key_dim, value_dim, rank, value_rank), heads = drawn.dims, drawn.sizes[1]
    g = torch.Generator().manual_seed(drawn.seed)
    sizes = (key_dim, rank), (key_dim, rank), (value_dim, value_rank), (value_rank, value_dim)
    found: list[Tensor] = []
    for size, each, columns in zip(sizes, drawn.each, drawn.columns, strict=True):
        x = torch.randn(*((heads,) if each else ()), *size, generator=g) / size[0] ** 0.5
        x = x.to(drawn.held)
        found.append(x.mT.contiguous().mT if columns else x)
    shift = torch.randn(heads, key_dim, generator=g).to(drawn.held)
    key, query, value, output = found
    keys = (key, query) if drawn.keys else (None, None)
    values = (value, output) if drawn.values else (None, None)
    maps = RowMaps(*keys, *values, shift if drawn.keys and drawn.shift else None)
    return maps if drawn.keys or drawn.values else None


def coordinates(x: Tensor, matrix: Tensor | None, shift: Tensor | None = None) -> Tensor:
    """Return vectors by row and head times a matrix, in float64."""
    if shift is not None:
        x = x - shift.to(x.dtype)
    if matrix is None:
        return x.double()
    count = len(matrix) if matrix.ndim == 3 else 1
    return (x.double().unflatten(1, (count, -1)) @ matrix.double()).flatten(1, 2)


@dataclass(frozen=True)
class Step:
    """A step with maps, and the attention over coordinates of the same tokens."""

    inputs: RowInputs
    case: Case  # in float64
    key: Tensor  # coordinates of all rows, in float64
    value: Tensor
    output: Tensor | None

    def expected(self) -> Tensor:
        """Return the output of the rows that decode, in float64."""
        found = self.case.attend(backend="reference").out.double()
        return coordinates(found.flatten(1, 3), self.output)


def step_of(draw: Drawn, case: Callable[..., Case], **more: Any) -> Step:
    """Return a step whose other rows are NaN, as is what its output was."""
    (key_dim, value_dim, rank, value_rank), (B, H, G) = draw.dims, draw.sizes
    maps = maps_of(draw)
    none = RowMaps() if maps is None else maps
    stored = rank if draw.keys else key_dim, value_rank if draw.values else value_dim
    padding = "all" if draw.padding else "none"
    tiers = [("8", "4"), ("bfloat16", "float32")]
    made = case(
        draw.seed, B=B, H=H, G=G, L=1, D=stored[0], Dv=stored[1], tiers=tiers, padding=padding
    )
    made = replace(made, scale=stored[0] ** -0.5)
    g = torch.Generator().manual_seed(draw.seed + 1)
    count = BEFORE + B + AFTER
    rows = slice(BEFORE, BEFORE + B)
    empty = (made.position < 0)[:, :, None]
    sizes = (H * G, key_dim), (H, key_dim), (H, value_dim)
    given = []
    for size in sizes:
        x = torch.full((count, *size), torch.nan)
        x[rows] = torch.randn(B, *size, generator=g).masked_fill(empty, torch.nan)
        given.append(x.to(draw.dtype))
    query, key, value = given
    out = torch.full((count, H * G, value_dim), torch.nan, dtype=draw.dtype)
    inputs = RowInputs(
        query, key, value, out, BEFORE, made.position, made.pages, made.scale, maps=maps, **more
    )
    q = coordinates(query, none.query)
    k, v = coordinates(key, none.key, none.shift), coordinates(value, none.value)
    rounded = [x.to(draw.dtype)[rows].double() for x in (q, k, v)]
    (fresh,) = made.dense
    new = replace(fresh, key=rounded[1].unsqueeze(2), value=rounded[2].unsqueeze(2))
    by_head = rounded[0].unflatten(1, (H, G)).unsqueeze(3)
    return Step(inputs, replace(made, q=by_head, dense=[new]), k, v, none.output)


def done(inputs: RowInputs) -> Attended:
    """Take the step, which must be supported."""
    assert declined(inputs) is None
    found = decode_rows(inputs)
    assert found is not None
    return found


def expect_near(mine: Tensor, theirs: Tensor, bound: float) -> None:
    torch.testing.assert_close(mine.double(), theirs, rtol=bound, atol=bound, equal_nan=True)


@given(draw=DRAWN)
@settings(max_examples=20)
def test_output_and_copies_are_those_of_coordinates(
    near: float, case: Callable[..., Case], draw: Drawn
) -> None:
    made = step_of(draw, case)
    (_, H, _), B = draw.sizes, draw.sizes[0]
    sizes = made.key.shape[2], made.value.shape[2]
    copies = tuple(torch.full((B, H, dim), torch.nan, dtype=draw.dtype) for dim in sizes)
    assert len(copies) == 2
    done(replace(made.inputs, copies=copies))
    rows, rounding = slice(BEFORE, BEFORE + B), EPSILON[draw.dtype]
    for copy, wanted in zip(copies, (made.key, made.value), strict=True):
        expect_near(copy, wanted[rows], 1e-5 + rounding / 2)
    output = made.inputs.output
    expect_near(output[rows], made.expected(), 2 * near + 2 * rounding)
    assert output[:BEFORE].isnan().all()
    assert output[-AFTER:].isnan().all()
    if draw.padding:
        assert (output[BEFORE + B - 1] == 0).all()


@given(draw=DRAWN, tokens=st.integers(0, BEFORE + 3))
@settings(max_examples=15)
def test_stored_tokens_are_coordinates(
    near: float, case: Callable[..., Case], draw: Drawn, tokens: int
) -> None:
    """Of all rows that have a place, whether they decode or not; others have the same bytes."""
    made = step_of(draw, case)
    dims, heads = (made.key.shape[2], made.value.shape[2]), draw.sizes[1]
    tokens = min(tokens, len(made.key))
    layout = PageLayout.sized(
        TokenFormat(*(RawCodec(dim, draw.dtype) for dim in dims)), 4, False, False
    )
    data = torch.full((tokens * heads + 3, layout.nbytes), 255, dtype=torch.uint8)
    page = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))[: tokens * heads]
    where = TokenPlaces(data, layout, page, torch.arange(tokens * heads) % 4)
    done(replace(made.inputs, places=where))
    untouched = torch.ones_like(data, dtype=torch.bool)
    (key_at, _, key_bytes), (value_at, _, value_bytes) = layout.segments
    for i, (number, slot) in enumerate(zip(page.tolist(), where.slot.tolist(), strict=True)):
        row, head = divmod(i, heads)
        for at, size, all_rows in (
            (key_at, key_bytes, made.key),
            (value_at, value_bytes, made.value),
        ):
            span = slice(at + slot * size, at + (slot + 1) * size)
            found = data[number, span].clone().view(draw.dtype)
            expect_near(found, all_rows[row, head], 1e-5 + EPSILON[draw.dtype] / 2)
            untouched[number, span] = False
    assert (data[untouched] == 255).all()


PLAIN = Drawn(
    (33, 17, 20, 9), (2, 2, 2), (True,) * 4, (False,) * 4, *(torch.float32,) * 2, *(True,) * 3,
    padding=False, seed=3,
)  # fmt: skip


def test_observations_are_those_of_coordinates(near: float, case: Callable[..., Case]) -> None:
    made = step_of(PLAIN, case, observations=(Observe(1, "max"),))
    found, wanted = done(made.inputs), made.case.attend(Observe(1, "max"), "reference")
    for mine, theirs in zip(found.mass, wanted.mass, strict=True):
        expect_near(mine, theirs.double(), near)


def test_any_number_of_threads_gives_the_same(near: float, case: Callable[..., Case]) -> None:
    many = replace(PLAIN, dims=(128, 128, 128, 128), sizes=(24, 2, 4), each=(False, True) * 2)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(done(step_of(many, case).inputs).out)
    finally:
        torch.set_num_threads(before)
    if near < 1e-3:  # others round weights in pieces of the work
        torch.testing.assert_close(*found, rtol=near, atol=near)
    expect_near(found[1].flatten(1, 3).view(24, 8, 128), step_of(many, case).expected(), 2 * near)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.ones(2, 33, 19)}, "key has 19 dimensions and q 20, after their maps"),
        ({"key": torch.ones(3, 33, 20)}, r"the map of keys is float32 \[3, 33, 20\]; it must be"),
        ({"query": torch.ones(32, 20)}, "q have 33 dimensions, and their map takes 32"),
        ({"value": torch.ones(17, 8)}, "the map of outputs takes 9 dimensions, and values have 8"),
        ({"output": torch.ones(9, 16)}, "out has 17 dimensions and the attention 16"),
        ({"shift": torch.ones(2, 32)}, r"the shift of keys is float32 \[2, 32\]; it must be"),
    ],
)
def test_maps_that_do_not_fit_are_refused(
    case: Callable[..., Case], change: dict[str, Tensor], message: str
) -> None:
    made = step_of(PLAIN, case)
    assert made.inputs.maps is not None
    maps = replace(made.inputs.maps, **change)
    with pytest.raises(RuntimeError, match=message):
        decode_rows(replace(made.inputs, maps=maps))
    assert made.inputs.output.isnan().all()


def test_a_map_that_shares_memory_with_the_output_is_refused(case: Callable[..., Case]) -> None:
    made = step_of(replace(PLAIN, dims=(20, 20, 20, 20), each=(False,) * 4), case)
    assert made.inputs.maps is not None
    shared = made.inputs.output.flatten(0, 1)[:20]
    maps = replace(made.inputs.maps, value=shared)
    with pytest.raises(RuntimeError, match="shares memory with the map of values"):
        decode_rows(replace(made.inputs, maps=maps))


def test_maps_that_are_not_supported_are_left_to_others(case: Callable[..., Case]) -> None:
    """Nothing is done, and the reason is given."""
    inputs = step_of(PLAIN, case).inputs
    maps = inputs.maps
    assert maps is not None
    assert maps.query is not None

    def reason(**changes: Tensor) -> str | None:
        changed = replace(inputs, maps=replace(maps, **changes))
        assert decode_rows(changed) is None
        assert inputs.output.isnan().all()
        return declined(changed)

    assert reason(query=maps.query.double()) == "maps in float64"
    gaps = maps.query.repeat_interleave(2, 2)[..., ::2]
    assert "neither in rows nor in columns" in str(reason(query=gaps))
    assert maps.shift is not None
    assert reason(shift=maps.shift.double()) == "maps in float64"
    wide = maps.shift.repeat_interleave(2, 1)[:, ::2]
    assert "neither in rows nor in columns" in str(reason(shift=wide))
    assert reason(query=maps.query.clone().requires_grad_()) == "gradients are required"


def test_a_shift_without_a_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match="keys have a shift and no matrix"):
        RowMaps(shift=torch.zeros(2, 6))
