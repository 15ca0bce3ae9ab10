"""Tokens in pages: vectors through their codecs, scores and positions beside them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True, slots=True)
class Stored:
    """Tokens of S streams in the order of their slots, padded to the longest stream.

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
    """Encode tokens and write each, with its score and position, to its row of its page."""
    # Both are encoded before either is written: a codec that refuses leaves the pages alone.
    encoded = (layout.format.key.encode(key[:, None]), layout.format.value.encode(value[:, None]))
    parts = [
        *_parts(encoded[0], layout.format.key),
        *_parts(encoded[1], layout.format.value),
    ]
    for segment, part in zip(format_segments(layout), parts, strict=True):
        put(data, segment, page, row, part)
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


def read_tokens(
    layout: PageLayout,
    held: Bool[Tensor, "S L"],
    take: Callable[[Segment], UInt8[Tensor, "S slots width"]],
    vectors: frozenset[Literal["keys", "values"]],
) -> Stored:
    """Read tokens with what `take` gives for a segment, at least L slots of it.

    Whatever bytes are where no token is held do not show.
    """
    scores, positions = score_segment(layout), position_segment(layout)
    parts, keys = format_segments(layout), len(layout.format.key.parts)

    def shown(slots: Tensor, padding: int) -> Tensor:
        mask = held if slots.ndim == 2 else held[..., None]
        return slots[:, : held.shape[1]].where(mask, padding)

    def decoded(codec: Codec, segments: Sequence[Segment]) -> Tensor:
        rows = torch.cat([take(segment) for segment in segments], dim=-1)
        return codec.decode(rows.flatten(0, 1)).view(*rows.shape[:2], codec.dim)

    return Stored(
        held,
        None if scores is None else shown(read_scores(take(scores)), 0),
        None if positions is None else shown(_read_positions(take(positions)), -1),
        shown(decoded(layout.format.key, parts[:keys]), 0) if "keys" in vectors else None,
        shown(decoded(layout.format.value, parts[keys:]), 0) if "values" in vectors else None,
    )


def _read_positions(rows: Tensor) -> Tensor:
    return rows.view(torch.int32)[..., 0].long()


def _parts(encoded: Tensor, codec: Codec) -> Sequence[Tensor]:
    return torch.split(encoded, list(codec.parts), dim=1)
