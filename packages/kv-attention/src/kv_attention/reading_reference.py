"""The reference of the selection of pages: by definition in float64, one table row at a time."""

import struct
from dataclasses import replace

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from kv_attention.page_bounds import PageBounds
from kv_policy import PagedTokens, PageReading
from kv_policy.key_codes import code_rotation


def select_pages(
    q: Float[Tensor, "B H G D"], pages: PagedTokens, bounds: PageBounds, reading: PageReading
) -> PagedTokens:
    """Select as `kv_attention.select_pages`.

    Slow on purpose; it shares no code with the backends that are tested against it.
    """
    tokens, dim, width = pages.layout.tokens, q.shape[-1], pages.table.shape[2]
    rotation = code_rotation(dim, q.device).double()
    rows, lengths, every = [], [], True
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            length = int(pages.length[b, h])
            held, full, known = -(-length // tokens), length // tokens, int(bounds.count[b, h])
            bounded = []
            for at in range(min(known, full)):
                place: tuple[int, ...] = (b, h, at)
                if bounds.both.ndim == 2:  # by page
                    column = width - 1 - at if pages.reverse else at
                    place = (int(pages.table[b, h, column]),)
                both = bounds.both[place]
                bounded.append(
                    _keys_of(both.tolist(), dim, tokens) if bounds.coded else both.double()
                )
            nearest = [float("-inf")] * full
            for query in q[b, h].double():
                found, rotated = [], query @ rotation
                step = rotated.abs().max() / 127
                rounded = (rotated / step).round() * step if step else rotated
                for both in bounded:
                    if bounds.coded:
                        found.append(float((both @ rounded).max()))
                        continue
                    # Not their maximum: a page of empty slots has no largest number.
                    found.append(float((query * both[:dim].where(query > 0, both[dim:])).sum()))
                for at, x in enumerate(found):
                    nearest[at] = max(nearest[at], x - max(found))
            always = [
                at
                for at in range(full)
                if at >= known
                or at * tokens < reading.first
                or (at + 1) * tokens > length - reading.last
            ]
            limit = int(reading.pages(torch.tensor(held), tokens)) - (held - full)
            count = min(max(limit, len(always)), full)
            others = sorted(set(range(full)) - set(always), key=lambda at: (-nearest[at], at))
            read = sorted(always + others[: count - len(always)])
            every &= count == full
            columns = read + [full] * (held - full)
            if pages.reverse:
                columns = [width - 1 - at for at in columns]
            rows.append([int(pages.table[b, h, at]) for at in columns])
            lengths.append(count * tokens + length % tokens)
    if every:
        return pages
    most = max(map(len, rows))
    table = torch.tensor([row + [0] * (most - len(row)) for row in rows], dtype=torch.int32)
    return replace(
        pages,
        table=table.view(*q.shape[:2], most).to(pages.table.device),
        length=torch.tensor(lengths).view(q.shape[:2]).to(pages.length),
        reverse=False,
        longest=most * tokens,
        tiles=None,
    )


def _keys_of(page: list[int], dim: int, tokens: int) -> Float64[Tensor, "L D"]:
    """Decode the codes of the keys in a page, by their definition (`kv_policy.key_codes`)."""
    keys = []
    for token in range(tokens):
        at = 4 * -(-dim // 16) * tokens + 2 * token
        (scale,) = struct.unpack("<e", bytes(page[at : at + 2]))
        key = []
        for d in range(dim):
            row, (plane, j) = d // 16, divmod(d % 16, 4)
            code = page[4 * (row * tokens + token) + j] >> 2 * plane & 3
            key.append((2 * code - 3) * scale)
        keys.append(key)
    return torch.tensor(keys, dtype=torch.float64)
