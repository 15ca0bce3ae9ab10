"""Decode steps on an engine's tensors: attention, output and storing in one call per layer."""

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
from kv_policy import PageLayout
from kv_policy.described import NUMBERS, described


class _Layout(NamedTuple):
    """Pages as the operator reads them, or why it does not."""

    declined: str | None
    part: tuple[int, ...] = ()  # as stored tokens
    tier: tuple[int, ...] = ()  # as places of new tokens
    scored: tuple[int, int] = (-1, -1)  # offsets of scores and positions


def decode_rows(inputs: RowInputs) -> Attended | None:
    """Do the step in one call; None if `declined` returns a reason.

    Raises:
        RuntimeError: the inputs do not match, or a table names a missing page; nothing is written.
        OSError: the library cannot be loaded.
        ValueError: the environment names an instruction set that is unavailable here.
    """
    if declined(inputs) is not None:
        return None
    watching = any(what.last != 0 for what in inputs.observations)
    tensors: list[Tensor] = []
    parts: list[int] = []
    running = [] if inputs.running is None else [*running_numbers(inputs.running)]
    groups: list[int] = []
    for group in inputs.groups:
        groups += (len(group.heads), *group.dims, len(group.pages), *group.heads)
    stored = [*inputs.pages, *(pages for group in inputs.groups for pages in group.pages)]
    positions = inputs.page_positions or (None,) * len(stored)
    for pages, position in zip(stored, positions, strict=True):
        width = longest_of(pages) if watching else 0
        place = None if inputs.running is None else position
        layout = _layout(pages.layout, pages.reverse, pages.holes, place is not None, width)
        if layout.declined is not None:
            return None
        tensors += paged_tensors(pages, place)
        parts += layout.part
        if inputs.running is not None:
            running += layout.scored
    sinks, places = inputs.sinks, inputs.places
    store: list[Tensor] = []
    tier: tuple[int, ...] = ()
    if places is not None:
        layout = _layout(places.layout, False, False, False, 0)
        if layout.declined is not None:
            return None
        store, tier = [places.data, places.page, places.slot], layout.tier
    found = torch.ops.kv_cpu.decode_rows(
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.position,
        inputs.output,
        inputs.first,
        tensors,
        parts,
        *watches(inputs.observations),
        running,
        groups,
        inputs.scale,
        inputs.softcap or 0.0,
        [] if sinks is None else [sinks.float().contiguous()],
        store,
        tier,
        inputs.copies or (),
        [] if inputs.maps is None else inputs.maps.tensors,
        [] if inputs.maps is None else inputs.maps.kinds,
        chosen(),
    )
    out = _rows_of(inputs)
    if not watching and len(inputs.observations) == 1:
        return Attended(out)
    if inputs.running is not None:  # of the parts, new tokens alone have sums
        return Attended(out, (found[-2][0],), (found[-1][0],), rescored=True)
    return Attended.of(to_attended(out, found, inputs.observations))


def _rows_of(inputs: RowInputs) -> Float[Tensor, "B H G 1 Dv"]:
    """Return the sequences' rows of the output, in one operation, as each layer does it."""
    output, heads = inputs.output, inputs.key.shape[1]
    by_token, by_query, _ = output.stride()
    group = output.shape[1] // heads
    shape = inputs.position.shape[0], heads, group, 1, output.shape[2]
    step = by_token, group * by_query, by_query, 1, 1
    return output.as_strided(shape, step, output.storage_offset() + inputs.first * by_token)


def declined(inputs: RowInputs) -> str | None:
    """Return why native code does not compute attention on these tensors; None if it does."""
    q, key, value, output = inputs.query, inputs.key, inputs.value, inputs.output
    for x in (q, key, value, output):
        if x.dtype not in NUMBERS:
            return "vectors in float64"
        if x.stride(2) != 1:
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
