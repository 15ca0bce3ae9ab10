"""Tokens in pages: vectors through their codecs, scores and positions beside them."""

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

    Where `held` is false there is no token: its score is 0, its position -1, its vectors are 0.
    """

    held: Bool[Tensor, "S L"]
    score: Float[Tensor, "S L"] | None = None  # float32, if pages hold scores
    position: Int[Tensor, "S L"] | None = None  # if pages hold positions
    key: Float[Tensor, "S L D"] | None = None  # if asked for
    value: Float[Tensor, "S L Dv"] | None = None  # if asked for


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

    Where the format encodes several tokens together, those of a block come one after the other.
    """
    # All is encoded before anything is written: a codec that refuses leaves the pages alone.
    write_encoded(data, layout, page, row, encode_tokens(layout, key, value), score, position)


def encode_tokens(
    layout: PageLayout, key: Float[Tensor, "n D"], value: Float[Tensor, "n Dv"]
) -> tuple[UInt8[Tensor, "blocks _"], ...]:
    """Encode tokens, and give the bytes of each part of the format."""
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
    """Write tokens that are encoded already."""
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
    """Read bytes as scores."""
    return rows.view(torch.float32)[..., 0]


def read_positions(rows: UInt8[Tensor, "*S 4"]) -> Int[Tensor, "*S"]:
    """Read bytes as positions."""
    return rows.view(torch.int32)[..., 0].long()


def read_tokens(
    layout: PageLayout,
    held: Bool[Tensor, "S L"],
    take: Callable[[Segment], UInt8[Tensor, "S rows width"]],
    vectors: VectorNames,
    inside: Int[Tensor, " S"] | None = None,
) -> Stored:
    """Read tokens with what `take` gives for a segment, at least L slots of it.

    Whatever bytes are where no token is held do not show. With `inside` one block of each row is
    taken, and its token of that number is given, so L is 1.
    """
    scores, positions = score_segment(layout), position_segment(layout)
    parts, keys = format_segments(layout), len(layout.format.key.parts)
    vector = partial(_decoded, held, take, inside)
    return Stored(
        held,
        None if scores is None else _shown(held, read_scores(take(scores)), 0),
        None if positions is None else _shown(held, read_positions(take(positions)), -1),
        vector(layout.format.key, parts[:keys]) if "keys" in vectors else None,
        vector(layout.format.value, parts[keys:]) if "values" in vectors else None,
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
