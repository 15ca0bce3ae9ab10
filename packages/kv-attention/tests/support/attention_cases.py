"""Random paged caches: small codecs of codes, and pages filled by PageLayout alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import settings
from torch import Tensor

from kv_attention import Attended, AttentionInputs, DenseTokens, attend
from kv_attention.checks import check_parts
from kv_policy import (
    BitLayout,
    Codec,
    KeyPrefix,
    Observe,
    PagedTokens,
    PageLayout,
    PlaneLayout,
    RawCodec,
    TokenFormat,
)

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

NOT_A_PAGE = -(10**6)


def aligned(data: Tensor) -> Tensor:
    """Copy to separate memory, so that it can be viewed as wider numbers."""
    return data.clone(memory_format=torch.contiguous_format)


def packed(codes: Tensor, planes: PlaneLayout) -> Tensor:
    """Pack codes [..., D], dimension by dimension."""
    data = torch.zeros(*codes.shape[:-1], planes.stride, dtype=torch.uint8)
    start = low = 0
    for plane in planes.each:
        part = (codes >> low) & (2**plane.bits - 1)
        for d in range(planes.dim):
            byte, bit = plane.place(d)
            data[..., start + byte] |= part[..., d].to(torch.uint8) << bit
        start, low = start + plane.stride, low + plane.bits
    return data


def unpacked(data: Tensor, planes: PlaneLayout) -> Tensor:
    """Unpack codes [..., D], dimension by dimension."""
    codes = torch.zeros(*data.shape[:-1], planes.dim, dtype=torch.long)
    start = low = 0
    for plane in planes.each:
        for d in range(planes.dim):
            byte, bit = plane.place(d)
            part = (data[..., start + byte] >> bit) & (2**plane.bits - 1)
            codes[..., d] |= part.long() << low
        start, low = start + plane.stride, low + plane.bits
    return codes


@dataclass(frozen=True)
class Levels:
    """Codes of uneven levels, with one scale a vector."""

    dim: int
    bits: int
    block: int = 1

    @property
    def layout(self) -> PlaneLayout:
        count = 2**self.bits
        levels = tuple((i - 0.4 * count) * (1 + 0.1 * i) * 2 / count for i in range(count))
        return PlaneLayout(self.dim, self.bits, self.dim, levels=tuple(sorted(levels)))

    @property
    def parts(self) -> tuple[int, int]:
        return self.layout.parts

    def encode(self, x: Tensor) -> Tensor:
        levels = torch.tensor(self.layout.levels).double()
        scale = x[:, 0].double().square().mean(1, keepdim=True).sqrt().clamp(min=1e-4).half()
        codes = ((x[:, 0].double() / scale)[..., None] - levels).abs().argmin(-1)
        return torch.cat([packed(codes, self.layout), scale.view(torch.uint8)], dim=1)

    def decode(self, data: Tensor) -> Tensor:
        stride, levels = self.layout.stride, torch.tensor(self.layout.levels).double()
        scale = aligned(data[:, stride:]).view(torch.float16).double()
        return (levels[unpacked(data[:, :stride], self.layout)] * scale)[:, None]

    def bound(self, x: Tensor) -> Tensor:
        return torch.full_like(x, torch.inf)


@dataclass(frozen=True)
class Integers:
    """Asymmetric integers in planes; a group of dimensions of `block` tokens has one scale."""

    dim: int
    bits: int
    group: int
    block: int = 1

    @property
    def planes(self) -> PlaneLayout:
        return PlaneLayout(self.dim, self.bits, self.group, self.block)

    @property
    def layout(self) -> BitLayout | PlaneLayout:
        return self.planes.plain

    @property
    def parts(self) -> tuple[int, int]:
        return self.layout.parts

    def encode(self, x: Tensor) -> Tensor:
        layout, x = self.layout, x.double()
        codes = torch.zeros(x.shape, dtype=torch.long)
        numbers = torch.zeros(len(x), 2, layout.groups, dtype=torch.float16)
        top = 2**self.bits - 1
        for g, of in enumerate(torch.arange(self.dim).split(self.group)):
            zero = x[..., of].amin((1, 2)).half()
            scale = ((x[..., of].amax((1, 2)) - zero) / top).clamp(min=1e-4).half()
            above = x[..., of] - zero[:, None, None]
            codes[..., of] = (above / scale[:, None, None]).round().clamp(0, top).long()
            numbers[:, 0, g], numbers[:, 1, g] = scale, zero
        data = packed(codes, self.planes)
        return torch.cat([data.flatten(1), numbers.view(torch.uint8).flatten(1)], dim=1)

    def decode(self, data: Tensor) -> Tensor:
        layout, split = self.layout, self.parts[0]
        rows = data[:, :split].reshape(len(data), self.block, layout.stride)
        numbers = aligned(data[:, split:]).view(torch.float16).double()
        group = torch.arange(self.dim) // self.group
        scale, zero = numbers[:, group], numbers[:, layout.groups + group]
        return unpacked(rows, self.planes) * scale[:, None] + zero[:, None]

    def bound(self, x: Tensor) -> Tensor:
        return torch.full_like(x, torch.inf)


@dataclass(frozen=True)
class Rows:
    """Blocks of tokens that are encoded one by one: the codes of all, then their scales."""

    each: Integers
    block: int

    @property
    def dim(self) -> int:
        return self.each.dim

    @property
    def layout(self) -> BitLayout | PlaneLayout:
        return self.each.layout

    @property
    def parts(self) -> tuple[int, int]:
        codes, numbers = self.each.parts
        return self.block * codes, self.block * numbers

    def encode(self, x: Tensor) -> Tensor:
        rows = self.each.encode(x.flatten(0, 1)[:, None])
        parts = rows.split(list(self.each.parts), dim=1)
        return torch.cat([part.reshape(len(x), -1) for part in parts], dim=1)

    def decode(self, data: Tensor) -> Tensor:
        parts = data.split(list(self.parts), dim=1)
        rows = [part.reshape(len(data) * self.block, -1) for part in parts]
        return self.each.decode(torch.cat(rows, dim=1)).view(len(data), self.block, self.dim)

    def bound(self, x: Tensor) -> Tensor:
        return torch.full_like(x, torch.inf)


@dataclass(frozen=True)
class Shared:
    """Blocks of tokens that share their mean: two parts, and no BitLayout."""

    dim: int
    block: int
    layout: None = None

    @property
    def parts(self) -> tuple[int, int]:
        return (2 * self.dim, 4 * self.block * self.dim)

    def encode(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=1).half()
        rest = (x - mean[:, None]).float().flatten(1)
        return torch.cat([mean.view(torch.uint8), rest.view(torch.uint8)], dim=1)

    def decode(self, data: Tensor) -> Tensor:
        mean = aligned(data[:, : 2 * self.dim]).view(torch.float16).float()
        rest = aligned(data[:, 2 * self.dim :]).view(torch.float32)
        return rest.view(-1, self.block, self.dim) + mean[:, None]

    def bound(self, x: Tensor) -> Tensor:
        return torch.full_like(x, torch.inf)


def codec(name: str, dim: int, group: int, block: int) -> Codec:
    """Return a codec: `8`, `4`, `3`, `2` or `1` for integers, `shared`, or the name of a dtype.

    Integers of blocks are `4c` with scales per channel, `4r` with those of `4`; levels are `4n`.
    """
    if name[:-1].isdigit():
        bits = int(name[:-1])
        if name.endswith("n"):
            return Levels(dim, bits)
        if name.endswith("c"):
            return Integers(dim, bits, 1, block)
        return Rows(Integers(dim, bits, group), block)
    if name.isdigit():
        return Integers(dim, int(name), group)
    return Shared(dim, block) if name == "shared" else RawCodec(dim, getattr(torch, name))


def pack(
    key: Tensor,
    value: Tensor,
    length: Tensor,
    codecs: tuple[Codec, Codec],
    tokens: int,
    spare: int,
    position: Tensor | None = None,
) -> PagedTokens:
    """Encode the first `length[b, h]` tokens of [B, H, S, D] into pages in a shuffled order.

    Bytes that no token uses are 255: NaN in every floating-point format, the largest code. Entries
    of the table past a row's last page are not valid page numbers. If a `position` is given, pages
    store it, and the bytes of a slot with position -1 are 255 unless tokens are block-encoded.
    """
    form = TokenFormat(*codecs)
    exact = PageLayout.sized(form, tokens, bool(spare % 2), position is not None)
    layout = replace(exact, nbytes=exact.nbytes + spare)
    need = -(-length // tokens)
    total = int(need.sum()) + 2
    free = torch.randperm(total, generator=torch.Generator().manual_seed(tokens)).tolist()
    data = torch.full((total, layout.nbytes), 255, dtype=torch.uint8)
    table = torch.full((*length.shape, int(need.max()) + 1), NOT_A_PAGE, dtype=torch.int32)
    split = len(form.key.parts)
    halves = (key, form.key, layout.segments[:split]), (value, form.value, layout.segments[split:])
    for b, h in torch.cartesian_prod(*map(torch.arange, length.shape)).tolist():
        mine = [free.pop() for _ in range(int(need[b, h]))]
        table[b, h, : len(mine)] = torch.tensor(mine)
        count = int(length[b, h])
        blocks = -(-count // form.block)
        for x, of, segments in halves:
            # The last block is padded with its last token, the last page with bytes 255.
            slots = torch.arange(blocks * form.block).clamp(max=max(count - 1, 0))
            rows = torch.full((len(mine) * layout.rows, sum(of.parts)), 255, dtype=torch.uint8)
            if count:
                rows[:blocks] = of.encode(x[b, h, slots].unflatten(0, (blocks, form.block)))
                if position is not None and form.block == 1:
                    rows[:count][position[b, h, :count] < 0] = 255
            for (offset, _, size), part in zip(segments, rows.split(of.parts, 1), strict=True):
                data[mine, offset : offset + layout.rows * size] = part.reshape(
                    len(mine), layout.rows * size
                )
        if position is not None:
            places = torch.full((len(mine) * tokens,), -1, dtype=torch.int32)
            places[:count] = position[b, h, :count].int()
            start = layout.position_offset
            places = places.view(torch.uint8).view(len(mine), 4 * tokens)
            data[mine, start : start + 4 * tokens] = places
    return PagedTokens(data, table, length, layout, holes=position is not None)


@dataclass(frozen=True)
class Case:
    """Arguments of `attend`; stored tokens have the positions 0, 1, ... over all tiers."""

    q: Tensor
    position: Tensor
    pages: list[PagedTokens]
    dense: list[DenseTokens]
    page_positions: list[Tensor]
    scale: float = 0.3
    softcap: float | None = None
    sinks: Tensor | None = None
    chosen: Tensor | None = None

    def to(self, device: str) -> "Case":
        """Return the case on a device."""
        pages = [
            replace(p, data=p.data.to(device), table=p.table.to(device), length=p.length.to(device))
            for p in self.pages
        ]
        dense = [
            replace(
                d, key=d.key.to(device), value=d.value.to(device), position=d.position.to(device)
            )
            for d in self.dense
        ]
        places = [place.to(device) for place in self.page_positions]
        sinks = None if self.sinks is None else self.sinks.to(device)
        moved = self.q.to(device), self.position.to(device), pages, dense, places
        chosen = None if self.chosen is None else self.chosen.to(device)
        return Case(*moved, self.scale, self.softcap, sinks, chosen)

    def inputs(self, *observations: Observe) -> AttentionInputs:
        """Return the arguments for a backend."""
        dim = check_parts(self.q, self.pages, self.dense)
        places = self.page_positions
        given = (self.q, self.position, self.pages, self.dense, places, dim, self.scale)
        watch = observations or (Observe(0),)
        return AttentionInputs(*given, watch, self.softcap, self.sinks, self.chosen)

    def attend(
        self,
        observe: Observe | None = None,
        backend: str = "torch",
        others: Sequence[Observe] = (),
    ) -> Attended:
        """Compute attention with these arguments."""
        return attend(
            self.q,
            self.position,
            self.pages,
            self.dense,
            self.scale,
            observe or Observe(),
            self.page_positions,
            backend,
            others,
            self.softcap,
            self.sinks,
            self.chosen,
        )


def random_case(
    seed: int = 0,
    *,
    B: int = 2,
    H: int = 2,
    G: int = 2,
    L: int = 3,
    D: int = 5,
    Dv: int = 5,
    tiers: Sequence[tuple[str, str]] = (("8", "4"),),
    stored: int = 20,
    group: int = 128,
    block: int = 1,
    page: int = 4,
    spare: int = 0,
    window: int = 0,
    fresh: bool = True,
    padding: str = "none",
    ragged: bool = True,
    dtype: torch.dtype = torch.float32,
    reverse: bool = False,
    holes: bool = False,
    known: bool = False,
    scale: float = 0.3,
    softcap: float | None = None,
    sinks: bool = False,
) -> Case:
    """Draw a cache of tiers of up to `stored` tokens, a window and a new chunk of L tokens.

    `padding` is none, left, right or all (of the last sequence). Empty slots contain NaN. With
    `reverse` tables are filled from the right, with `holes` some slots of pages are empty, with
    `known` the host knows a bound of the lengths, and which dense tensors are full. Sinks are about
    as large as the log-sum-exp of a few tokens.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    def count(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most + 1, shape, generator=g)

    pages, positions, past = [], [], 0
    for names in tiers:
        length = count(stored, B, H) if ragged else torch.full((B, H), stored)
        wide = stored + 3  # more positions than slots may be given
        keys = codec(names[0], D, group, block)
        inside = names[1] == "prefix"
        codecs = keys, KeyPrefix(keys, Dv) if inside else codec(names[1], Dv, group, block)
        place = torch.arange(past, past + wide).expand(B, H, -1)
        place = place.where(place - past < length[..., None], -1)
        if holes:
            place = place.where(torch.rand(B, H, wide, generator=g) < 0.6, -1)
        packed = pack(
            normal(B, H, wide, D),
            normal(B, H, wide, Dv),
            length,
            codecs,
            page * block,
            spare,
            place if holes else None,
        )
        if reverse:
            packed = replace(packed, table=packed.table.flip(-1), reverse=True)
        if known:
            packed = replace(packed, longest=int(length.max()) + 1)
        pages.append(packed)
        positions.append(place)
        past += wide
    dense = []
    if window:
        place = torch.arange(past, past + window).expand(B, -1)
        dense.append(place.where(torch.rand(B, window, generator=g) < 0.7, -1))  # holes anywhere
        past += window
    pads = count(L - 1, B, 1) if padding in ("left", "right") else torch.zeros(B, 1)
    column = torch.arange(L).expand(B, -1)
    if padding == "left":
        position = torch.where(column < pads, -1, past + column - pads.long())
    else:
        position = torch.where(column < L - pads, past + column, -1)
    if padding == "all":
        position[-1] = -1
    if fresh:
        dense.append(position)
    tokens = []
    for place in dense:
        empty = (place < 0)[:, None, :, None]
        k, v = normal(B, H, place.shape[1], D), normal(B, H, place.shape[1], Dv)
        k, v = k.masked_fill(empty, torch.nan), v.masked_fill(empty, torch.nan)
        tokens.append(DenseTokens(k, v, place, bool((place >= 0).all()) if known else None))
    q = normal(B, H, G, L, D)
    q = q.masked_fill((position < 0)[:, None, None, :, None], torch.nan)
    drawn = normal(H, G) + 1.5 if sinks else None
    return Case(q, position, pages, tokens, positions, scale, softcap, drawn)
