"""Decode steps on an engine's tensors: attention, output and storing in one call per layer."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kv_attention import Attended, RowInputs, RowMaps, longest_of
from kv_cpu.arguments import (
    MOST_DIM,
    MOST_GROUP,
    numbers_of_pages,
    paged_tensors,
    to_attended,
    watches,
)
from kv_cpu.library import chosen
from kv_cpu.pages import running_numbers, tier_numbers
from kv_policy import PagedTokens, PageLayout
from kv_policy.described import NUMBERS, described


class _Layout(NamedTuple):
    """Pages as the operator reads them, or why it does not."""

    declined: str | None
    part: tuple[int, ...] = ()  # as stored tokens
    tier: tuple[int, ...] = ()  # as places of new tokens
    scored: tuple[int, int] = (-1, -1)  # offsets of scores and positions


class _Numbers(NamedTuple):
    """What the operator is told beside tensors: the same for all layers that share a memo."""

    watching: bool
    parts: list[int]
    watch: list[int]
    above: list[float]
    running: list[int]
    groups: list[int]
    tier: tuple[int, ...]
    isa: str


def decode_rows(inputs: RowInputs) -> Attended | None:
    """Do the step in one call; None if `declined` returns a reason.

    Raises:
        RuntimeError: the inputs do not match, or a table names a missing page; nothing is written.
        OSError: the library cannot be loaded.
        ValueError: the environment names an instruction set that is unavailable here.
    """
    memo = inputs.memo
    numbers = None if memo is None else memo.found
    if isinstance(numbers, _Numbers):
        if _apart(inputs) or (inputs.maps is not None and _unmapped(inputs.maps) is not None):
            return None
    else:
        numbers = None if declined(inputs) is not None else _numbers_of(inputs)
        if numbers is None:
            return None
        if memo is not None and not torch.is_grad_enabled():
            memo.found = numbers
    kept = inputs.kept
    tensors = None if kept is None else kept.found
    if not isinstance(tensors, list):
        tensors, same = _tensors_of(inputs)
        if kept is not None and same:
            kept.found = tensors
    sinks, places, maps = inputs.sinks, inputs.places, inputs.maps
    found = torch.ops.kv_cpu.decode_rows(
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.position,
        inputs.output,
        inputs.first,
        tensors,
        numbers.parts,
        numbers.watch,
        numbers.above,
        numbers.running,
        numbers.groups,
        inputs.scale,
        inputs.softcap or 0.0,
        () if sinks is None else (sinks.float().contiguous(),),
        () if places is None else (places.data, places.page, places.slot),
        numbers.tier,
        inputs.copies or (),
        () if maps is None else maps.tensors,
        () if maps is None else maps.kinds,
        numbers.isa,
    )
    out = _rows_of(inputs)
    if not numbers.watching and len(inputs.observations) == 1:
        return Attended(out)
    if inputs.running is not None:  # of the parts, new tokens alone have sums
        return Attended(out, (found[-2][0],), (found[-1][0],), rescored=True)
    return Attended.of(to_attended(out, found, inputs.observations))


def _stored(inputs: RowInputs) -> Sequence[PagedTokens]:
    """Return the stored tokens of all heads, part by part."""
    if not inputs.groups:
        return inputs.pages
    return [*inputs.pages, *(pages for group in inputs.groups for pages in group.pages)]


def _tensors_of(inputs: RowInputs) -> tuple[list[Tensor], bool]:
    """Return the tensors of stored tokens, and whether none of them is a copy."""
    stored = _stored(inputs)
    places: Sequence[Tensor | None] = (None,) * len(stored)
    if inputs.running is not None:
        places = inputs.page_positions or places
    found: list[Tensor] = []
    same = True
    for pages, place in zip(stored, places, strict=True):
        read = paged_tensors(pages, place)
        given = pages.data, pages.table, pages.length, pages.length if place is None else place
        same = same and all(a is b for a, b in zip(read, given, strict=True))
        found += read
    return found, same


def _numbers_of(inputs: RowInputs) -> _Numbers | None:
    """Describe the inputs; None if native code does not read their pages."""
    watching = any(what.last != 0 for what in inputs.observations)
    parts: list[int] = []
    running = [] if inputs.running is None else [*running_numbers(inputs.running)]
    groups: list[int] = []
    for group in inputs.groups:
        groups += (len(group.heads), *group.dims, len(group.pages), *group.heads)
    stored = _stored(inputs)
    positions = inputs.page_positions or (None,) * len(stored)
    for pages, position in zip(stored, positions, strict=True):
        placed = inputs.running is not None and position is not None
        width = 0
        if inputs.running is not None and not placed:  # no sums are made: any bound will do
            width = pages.table.shape[2] * pages.layout.tokens
        elif watching:
            width = longest_of(pages)
        layout = _layout(pages.layout, pages.reverse, pages.holes, placed, width)
        if layout.declined is not None:
            return None
        parts += layout.part
        if inputs.running is not None:
            running += layout.scored
    tier: tuple[int, ...] = ()
    if inputs.places is not None:
        layout = _layout(inputs.places.layout, False, False, False, 0)
        if layout.declined is not None:
            return None
        tier = layout.tier
    watch, above = watches(inputs.observations)
    return _Numbers(watching, parts, watch, above, running, groups, tier, chosen())


def _apart(inputs: RowInputs) -> bool:
    """Return whether the numbers of a vector are apart in memory."""
    vectors = inputs.query.stride(2), inputs.key.stride(2), inputs.value.stride(2)
    return (*vectors, inputs.output.stride(2)) != (1, 1, 1, 1)


def _rows_of(inputs: RowInputs) -> Float[Tensor, "B H G 1 Dv"]:
    """Return the sequences' rows of the output."""
    output, first, rows = inputs.output, inputs.first, inputs.position.shape[0]
    if first or output.shape[0] != rows:
        output = output[first : first + rows]
    _, queries, dim = output.shape
    heads = inputs.key.shape[1]
    return output.view(rows, heads, queries // heads, 1, dim)


def declined(inputs: RowInputs) -> str | None:
    """Return why native code does not compute attention on these tensors; None if it does."""
    q, key, value, output = inputs.query, inputs.key, inputs.value, inputs.output
    if not {q.dtype, key.dtype, value.dtype, output.dtype} <= NUMBERS.keys():
        return "vectors in float64"
    if _apart(inputs):
        return "vectors whose numbers are not consecutive"
    if not q.is_cpu:
        return f"tensors on {q.device.type}"
    (_, heads, dim), (_, kv_heads, value_dim) = q.shape, value.shape
    if heads > MOST_GROUP * kv_heads or max(dim, value_dim) > MOST_DIM:
        return f"more than {MOST_GROUP} queries of a KV head, or {MOST_DIM} dimensions"
    for what in inputs.observations:
        if what.last != 0 and (what.skip > 1 or what.gumbel is not None):
            return "an observation needs positions or noise"
    watching = any(what.last != 0 for what in inputs.observations)
    if inputs.groups and (watching or inputs.places is not None):
        return "heads of different dimensions are observed, or their new tokens stored"
    if inputs.running is not None:
        only = inputs.observations[0]
        if len(inputs.observations) > 1 or only.last == 0 or only.also:
            return "scores are updated with one sum of attention mass"
        if not all(pages.layout.scores for pages in inputs.pages):
            return "pages without scores"
    given = () if inputs.maps is None else inputs.maps.tensors
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, key, value, *given)):
        return "gradients are required"
    return None if inputs.maps is None else _unmapped(inputs.maps)


def _unmapped(maps: RowMaps) -> str | None:
    """Return why native code does not compute products with these matrices; None if it does."""
    for x in maps.tensors:
        if x.dtype not in NUMBERS:
            return "maps in float64"
        if not x.is_cpu:
            return f"maps on {x.device.type}"
    if maps.width > MOST_DIM:
        return f"maps of more than {MOST_DIM} dimensions"
    if not maps.consecutive:
        return "maps with consecutive numbers neither in rows nor in columns"
    return None


@lru_cache(maxsize=64)
def _layout(layout: PageLayout, reverse: bool, holes: bool, placed: bool, width: int) -> _Layout:
    pages = described(layout, planes=True)
    if pages.declined is not None:
        return _Layout(pages.declined)
    part = numbers_of_pages(layout, reverse=reverse, holes=holes, placed=placed, width=width)
    tier = tuple(tier_numbers(layout, False))
    return _Layout(
        None, tuple(part), tier, (layout.score_offset, pages.positions if layout.positions else -1)
    )
