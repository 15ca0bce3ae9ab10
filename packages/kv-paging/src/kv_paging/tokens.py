"""Tokens in pages: encoded vectors, scores and positions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from kv_paging.moves import (
    Segment,
    format_segments,
    position_segment,
    put,
    put_pages,
    score_segment,
)
from kv_policy import Codec, PageLayout

VectorNames: TypeAlias = frozenset[Literal["keys", "values"]]
NONE: Final[VectorNames] = frozenset()
BOTH: Final[VectorNames] = frozenset({"keys", "values"})


@dataclass(frozen=True, slots=True)
class Stored:
    """Tokens of S table rows in the order of their slots, padded to the longest table row.

    If `held` is false the slot is empty: its score is 0, its position -1, its vectors are 0.
    """

    held: Bool[Tensor, "S L"]
    score: Float[Tensor, "S L"] | None = None  # float32, if pages store scores
    position: Int[Tensor, "S L"] | None = None  # if pages store positions
    key: Float[Tensor, "S L D"] | None = None  # if requested
    value: Float[Tensor, "S L Dv"] | None = None  # if requested


def write_tokens(
    data: UInt8[Tensor, "P nbytes"],
    layout: PageLayout,
    page: Int[Tensor, " n"],
    row: Int[Tensor, " n"],
    key: Float[Tensor, "n D"],
    value: Float[Tensor, "n Dv"],
    score: Float[Tensor, " n"] | None,
    position: Int[Tensor, " n"] | None,
) -> None:
    """Encode tokens and write each, with its score and position, to its row of its page.

    For block-encoded formats, the tokens of a block are consecutive.
    """
    # Everything is encoded before anything is written: if a codec raises, pages are unchanged.
    write_encoded(data, layout, page, row, encode_tokens(layout, key, value), score, position)


def write_vectors(
    data: UInt8[Tensor, "P nbytes"],
    layout: PageLayout,
    page: Int[Tensor, " n"],
    row: Int[Tensor, " n"],
    key: Float[Tensor, "n D"] | None,
    value: Float[Tensor, "n Dv"],
) -> None:
    """Encode values, and keys if they are given, over those of tokens that are encoded alone."""
    form, segments = layout.format, format_segments(layout)
    keys = len(form.key.parts)
    for codec, x, mine in (
        (form.key, key, segments[:keys]),
        (form.value, value, segments[keys:]),
    ):
        if x is None:
            continue
        parts = torch.split(codec.encode(x[:, None]), list(codec.parts), dim=1)
        for segment, part in zip(mine, parts, strict=True):
            put(data, segment, page, row, part)


def encode_tokens(
    layout: PageLayout, key: Float[Tensor, "n D"], value: Float[Tensor, "n Dv"]
) -> tuple[UInt8[Tensor, "blocks _"], ...]:
    """Encode tokens, and return the bytes of each part of the format."""
    form = layout.format
    parts: list[Tensor] = []
    for codec, x in ((form.key, key), (form.value, value)):
        encoded = codec.encode(x.reshape(-1, codec.block, codec.dim))
        parts.extend(torch.split(encoded, list(codec.parts), dim=1))
    return tuple(parts)


def write_encoded(
    data: UInt8[Tensor, "P nbytes"],
    layout: PageLayout,
    page: Int[Tensor, " n"],
    row: Int[Tensor, " n"],
    parts: Sequence[UInt8[Tensor, "blocks _"]],
    score: Float[Tensor, " n"] | None,
    position: Int[Tensor, " n"] | None,
) -> None:
    """Write tokens that are already encoded."""
    block = layout.format.block
    where = (page, row) if block == 1 else (page[::block], row[::block] // block)
    for segment, part in zip(format_segments(layout), parts, strict=True):
        put(data, segment, *where, part)
    for place, number in (
        (score_segment(layout), None if score is None else score.to(torch.float32)),
        (position_segment(layout), None if position is None else position.to(torch.int32)),
    ):
        if place is not None and number is not None:
            put(data, place, page, row, number.contiguous()[:, None].view(torch.uint8))


def write_scores(
    data: UInt8[Tensor, "P nbytes"],
    segment: Segment,
    page: Int[Tensor, " n"],
    score: Float[Tensor, "n tokens"],
) -> None:
    """Write the scores of all slots of whole pages."""
    score = score.to(torch.float32).contiguous()
    put_pages(data, segment, page, score[..., None].view(torch.uint8))


def read_scores(rows: UInt8[Tensor, "*S 4"]) -> Float[Tensor, "*S"]:
    """Convert bytes to scores."""
    return rows.view(torch.float32)[..., 0]


def read_positions(rows: UInt8[Tensor, "*S 4"]) -> Int[Tensor, "*S"]:
    """Convert bytes to positions."""
    return rows.view(torch.int32)[..., 0].long()


def read_tokens(
    layout: PageLayout,
    held: Bool[Tensor, "S L"],
    take: Callable[[Segment], UInt8[Tensor, "S rows width"]],
    vectors: VectorNames,
    inside: Int[Tensor, " S"] | None = None,
) -> Stored:
    """Read tokens from the rows that `take` returns per segment, at least L slots.

    Bytes in empty slots have no effect. With `inside`, one block of each row is taken and only its
    token of that number is returned, so L is 1.
    """
    scores, positions = score_segment(layout), position_segment(layout)
    form, parts = layout.format, format_segments(layout)
    vector = partial(_decoded, held, take, inside)
    key = vector(form.key, parts[: len(form.key.parts)]) if "keys" in vectors else None
    value = None
    if "values" in vectors and key is not None and form.value_in_key:
        value = key[..., : form.value.dim]
    elif "values" in vectors:
        value = vector(form.value, parts[form.value_parts])
    return Stored(
        held,
        None if scores is None else _shown(held, read_scores(take(scores)), 0),
        None if positions is None else _shown(held, read_positions(take(positions)), -1),
        key,
        value,
    )


def _shown(held: Tensor, slots: Tensor, padding: int) -> Tensor:
    mask = held if slots.ndim == 2 else held[..., None]
    return slots[:, : held.shape[1]].where(mask, padding)


def _decoded(
    held: Tensor,
    take: Callable[[Segment], Tensor],
    inside: Tensor | None,
    codec: Codec,
    segments: Sequence[Segment],
) -> Tensor:
    rows = torch.cat([take(segment) for segment in segments], dim=-1)
    shape = (rows.shape[0], rows.shape[1] * codec.block, codec.dim)
    slots = codec.decode(rows.flatten(0, 1)).reshape(shape)
    if inside is not None:
        slots = slots.gather(1, inside[:, None, None].expand(-1, 1, codec.dim))
    return _shown(held, slots, 0)
