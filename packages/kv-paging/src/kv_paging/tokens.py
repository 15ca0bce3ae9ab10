"""Tokens in pages: vectors through their codecs, scores and positions beside them."""

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from kv_paging.moves import (
    Segment,
    format_segments,
    position_segment,
    put,
    put_pages,
    score_segment,
    take_pages,
)
from kv_policy import Codec, PageLayout


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


def read_scores(
    data: UInt8[Tensor, "P nbytes"], segment: Segment, page: Int[Tensor, "S T"]
) -> Float[Tensor, "S slots"]:
    """Read the scores of all slots of whole pages."""
    return take_pages(data, segment, page).view(torch.float32)[..., 0]


def read_positions(
    data: UInt8[Tensor, "P nbytes"], segment: Segment, page: Int[Tensor, "S T"]
) -> Int[Tensor, "S slots"]:
    """Read the positions of all slots of whole pages."""
    return take_pages(data, segment, page).view(torch.int32)[..., 0].long()


def write_scores(
    data: UInt8[Tensor, "P nbytes"],
    segment: Segment,
    page: Int[Tensor, " n"],
    score: Float[Tensor, "n tokens"],
) -> None:
    """Write the scores of all slots of whole pages."""
    score = score.to(torch.float32).contiguous()
    put_pages(data, segment, page, score[..., None].view(torch.uint8))


def read_keys(
    data: UInt8[Tensor, "P nbytes"], layout: PageLayout, page: Int[Tensor, "S T"]
) -> Float[Tensor, "S slots D"]:
    """Decode the keys of all slots of whole pages."""
    segments = format_segments(layout)[: len(layout.format.key.parts)]
    return _decode(data, segments, layout.format.key, page)


def read_values(
    data: UInt8[Tensor, "P nbytes"], layout: PageLayout, page: Int[Tensor, "S T"]
) -> Float[Tensor, "S slots Dv"]:
    """Decode the values of all slots of whole pages."""
    segments = format_segments(layout)[len(layout.format.key.parts) :]
    return _decode(data, segments, layout.format.value, page)


def _parts(encoded: Tensor, codec: Codec) -> Iterable[Tensor]:
    return torch.split(encoded, list(codec.parts), dim=1)


def _decode(data: Tensor, segments: Iterable[Segment], codec: Codec, page: Tensor) -> Tensor:
    rows = torch.cat([take_pages(data, segment, page) for segment in segments], dim=-1)
    return codec.decode(rows.flatten(0, 1)).view(*rows.shape[:2], codec.dim)
