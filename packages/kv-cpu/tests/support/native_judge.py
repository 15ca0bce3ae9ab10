"""A reference of the native operators: slow, straightforward computation from their arguments.

Every access is bounds-checked, so a call that would leave the memory of its arguments raises
IndexError here.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from kv_policy import PlaneLayout, RawCodec
from kv_policy.described import LEVELS, NUMBERS
from kv_quant import IntegerCodec, reference

DTYPES: Final = {number: dtype for dtype, number in NUMBERS.items()}
SIZES: Final = {1: 4, 2: 2, 3: 2}
EXACT: Final = 0.0
NEAR: Final = 3e-3  # for all instruction sets; other tests check the tolerance of each
PART: Final = (20, (2, 6))  # numbers of a part, and where those of its formats are
TIER: Final = (16, (8, 12))
MOST: Final = 4096  # slots and dimensions: bounds the memory of the reference
LARGE: Final = 64.0  # numbers above this have a rounding error of more than `NEAR`


def at(x: Tensor | Sequence[int], i: int) -> int:
    """Return an item, never counted from the end."""
    if not 0 <= i < len(x):
        raise IndexError(f"{i} of {len(x)}")
    return int(x[i])


def each_of(numbers: Sequence[int], of: tuple[int, tuple[int, int]]) -> list[list[int]]:
    """Return the numbers of each part or tier, with the levels of its codes."""
    (size, kinds), found, rest = of, [], list(numbers)
    while rest:
        if len(rest) < size:
            raise IndexError("numbers of a part or a tier")
        end = size + sum(_levels(*rest[kind : kind + 3]) for kind in kinds)
        if len(rest) < end:
            raise IndexError("levels of codes")
        found.append(rest[:end])
        rest = rest[end:]
    return found


def _levels(kind: int, _: int, bits: int) -> int:
    return 2**bits if kind == LEVELS and bits in (1, 2, 3, 4) else 0


@dataclass(frozen=True)
class Format:
    number: int
    dim: int
    bits: int
    group: int
    levels: tuple[float, ...] = ()

    @property
    def is_codes(self) -> bool:
        return self.number in (0, LEVELS)

    @property
    def planes(self) -> PlaneLayout:
        return PlaneLayout(self.dim, self.bits, min(self.group, self.dim), levels=self.levels)

    @property
    def bytes(self) -> int:
        return self.planes.stride if self.is_codes else self.dim * SIZES[self.number]

    @property
    def meta(self) -> int:
        return self.planes.parts[1] if self.is_codes else 0

    def encode(self, x: Tensor) -> Tensor:
        """Return the bytes of one vector."""
        if self.levels:
            data = reference.encode_levels(self.planes, self.levels, x.double().tolist())
            return torch.tensor(list(data), dtype=torch.uint8)
        if self.number:
            return RawCodec(self.dim, DTYPES[self.number]).encode(x[None, None])[0]
        codec = IntegerCodec(self.dim, self.bits, min(self.group, self.dim))
        return codec.encode(x[None, None].float())[0]

    def decode(self, codes: Tensor, meta: Tensor) -> Tensor:
        """Return the numbers of one vector, in float64."""
        if not self.is_codes:
            return codes.clone().view(DTYPES[self.number]).double()
        code, start, low = torch.zeros(self.dim, dtype=torch.long), 0, 0
        for plane in self.planes.each:
            for d in range(self.dim):
                byte, bit = plane.place(d)
                code[d] |= (int(codes[start + byte]) >> bit & (1 << plane.bits) - 1) << low
            start, low = start + plane.stride, low + plane.bits
        numbers = meta.clone().view(torch.float16).double()
        if self.levels:
            return torch.tensor(self.levels, dtype=torch.float32).double()[code] * numbers
        group = torch.arange(self.dim) // self.group
        scale, zero = numbers.view(2, -1)[:, group]
        return code * scale + zero


def formats_of(numbers: Sequence[int], of: tuple[int, tuple[int, int]]) -> tuple[Format, Format]:
    """Return the formats of a part or a tier."""
    size, (key, value) = of
    count = _levels(*numbers[key : key + 3])
    rest = numbers[size:]
    levels = struct.unpack(f"={len(rest)}d", struct.pack(f"={len(rest)}q", *rest))
    return (
        Format(*numbers[key : key + 4], levels[:count]),
        Format(*numbers[value : value + 4], levels[count:]),
    )


def span(page: Tensor, offset: int, row: int, width: int) -> Tensor:
    """Return the bytes of a row of a page."""
    first = offset + row * width
    if offset < 0 or row < 0 or first + width > len(page):
        raise IndexError(f"bytes {first} to {first + width} of {len(page)}")
    return page[first : first + width]


def vector(page: Tensor, place: Sequence[int], form: Format, row: int, share: int = 1) -> Tensor:
    meta = span(page, place[1], row // share, form.meta) if form.meta else page[:0]
    return form.decode(span(page, place[0], row, form.bytes), meta)


# Attention


@dataclass(frozen=True)
class Held:
    """The tokens of a table row in a part: slots, vectors, positions, whether they are paged."""

    slot: list[int]
    key: Tensor
    value: Tensor
    place: Tensor
    stored: bool


def held(tensors: Sequence[Tensor], numbers: Sequence[int], b: int, h: int) -> Held:
    paged, width, *rest = numbers
    key, value = formats_of(numbers, PART)
    if not paged:
        x, y, place = (
            tensors[0][b, h].double(),
            tensors[1][b, h].double(),
            tensors[2][b],
        )
        return Held(list(range(width)), x, y, place, False)
    data, table, length, place = tensors
    tokens, *places, position, reverse = rest[9:16]
    share = rest[16:18]
    row = table[b, h].flip(0) if reverse else table[b, h]
    slots, keys, values = [], [], []
    for slot in range(int(length[b, h])):
        number = at(row, slot // tokens)
        at(range(len(data)), number)
        page, inside = data[number], slot % tokens
        if position >= 0 and int(span(page, position, inside, 4).clone().view(torch.int32)) < 0:
            continue
        slots.append(slot)
        keys.append(vector(page, places[:2], key, inside, share[0]))
        values.append(vector(page, places[2:], value, inside, share[1]))
    where = torch.full((len(slots),), -1)
    if rest[8] and width:
        where = place[b, h][torch.tensor(slots, dtype=torch.long)]
    empty = torch.empty(0, key.dim).double(), torch.empty(0, value.dim).double()
    found = (torch.stack(keys), torch.stack(values)) if slots else empty
    return Held(slots, *found, where, True)


@dataclass(frozen=True)
class Bounds:
    """Lower and upper bounds of numbers; NaN if unknown."""

    low: Tensor
    high: Tensor
    near: float

    def hold(self, x: Tensor) -> bool:
        x = x.double()
        room = self.near * (1 + self.low.abs().maximum(self.high.abs()))
        fine = (x >= self.low - room) & (x <= self.high + room) | (x == self.low) | (x == self.high)
        return x.shape == self.low.shape and bool(
            (fine | self.low.isnan() | self.high.isnan()).all()
        )


def exactly(x: Tensor) -> Bounds:
    return Bounds(x.double(), x.double(), EXACT)


def unknown(x: Tensor, near: float) -> Bounds:
    """Return bounds of numbers, if they are small enough to be compared."""
    x = x.masked_fill(~(x.abs() < LARGE), torch.nan)
    return Bounds(x, x, near)


def parts_of(tensors: Sequence[Tensor], numbers: Sequence[int]) -> list[tuple[list, list]]:
    each = each_of(numbers, PART)
    if len(tensors) != 4 * len(each):
        raise IndexError("parts")
    for part in each:
        (key, value), tokens = part[18:20], part[11]
        if min(key, value) < 1 or (part[0] and (tokens % key or tokens % value)):
            raise IndexError("tokens that share scales")
    return [(tensors[4 * i : 4 * i + (4 if part[0] else 3)], part) for i, part in enumerate(each)]


def attention(q, position, tensors, numbers, value_dim, scale, softcap=0.0, sinks=()):
    """Return each query's output and log-sum-exp, and each table row's parts and logits."""
    at(range(MOST), value_dim)
    if not (softcap == 0 or 1e-30 <= softcap <= 1e30) or len(sinks) > 1:
        raise IndexError(f"softcap {softcap} and {len(sinks)} tensors of sinks")
    if sinks and (sinks[0].shape != q.shape[1:3] or sinks[0].dtype != torch.float32):
        raise IndexError(f"sinks {sinks[0].shape} {sinks[0].dtype}")
    sequences, heads, group, length, _ = q.shape
    parts = parts_of(tensors, numbers)
    out = torch.zeros(sequences, heads, group, length, value_dim).double()
    lse = torch.full((sequences, heads, group, length), -torch.inf).double()
    if sinks:
        lse = sinks[0].double()[..., None].expand_as(lse).clone()
        lse.masked_fill_((position < 0)[:, None, None], -torch.inf)
    table_rows = {}
    for b in range(sequences):
        for h in range(heads):
            query = position[b][:, None]
            # Table rows of padding alone are not read, so their page numbers may be any.
            each = [held(*part, b, h) for part in parts if (query >= 0).any()]
            if not each:
                continue
            sees = torch.cat(
                [(query >= 0) & (x.stored | ((x.place >= 0) & (x.place <= query))) for x in each],
                dim=1,
            )
            key, value = torch.cat([x.key for x in each]), torch.cat([x.value for x in each])
            logits = (q[b, h].double() @ key.mT) * scale
            if softcap:
                logits = softcap * (logits / softcap).tanh()
            p = torch.cat((logits.masked_fill(~sees, -torch.inf), lse[b, h][..., None]), -1)
            lse[b, h] = p.logsumexp(-1)
            weights = p.softmax(-1)[..., :-1].masked_fill(~sees, 0)
            given = [q[b, h], key, value, torch.tensor(scale), *sinks]
            given = [x for x in given if x.numel()]
            small = all(bool((x.abs() < LARGE).all()) for x in given)
            out[b, h] = weights @ value if small else torch.nan
            lse[b, h] = lse[b, h] if small else torch.nan
            table_rows[b, h] = each, logits if small else logits * torch.nan, sees
    return out, lse, table_rows


def observed(q, position, lse, table_rows, numbers, watches, above, last):
    """Return bounds of the sums of each part, and of the counts."""
    sequences, heads, group, _, _ = q.shape
    widths = [at(range(MOST), part[1]) for part in each_of(numbers, PART)]
    described, rest = [], list(watches)
    for share in above:
        how, skip, count = rest[:3]
        described.append((how, skip, rest[3 : 3 + count], share))
        if len(rest) < 3 + count:
            raise IndexError("watches")
        rest = rest[3 + count :]
    terms = sum(len(each[2]) for each in described)
    sums = [[torch.zeros(terms, sequences, heads, w).double() for w in widths] for _ in "lh"]
    seen = [torch.zeros(len(described), sequences, heads, w).double() for w in widths]
    orders = len(set(last)) == 1 or bool((position.diff(dim=1) >= 0).all())
    for (b, h), (parts, logits, sees) in table_rows.items():
        where = torch.cat([part.place for part in parts]).clamp(max=2**62)
        stored = torch.cat([torch.full((len(x.slot),), x.stored) for x in parts])
        real = position[b] >= 0
        later = real.long().flip(0).cumsum(0).flip(0)
        term = 0
        for w, (how, skip, kinds, share) in enumerate(described):
            counts = sees & (real & (later <= last[w]))[:, None]
            apart = torch.where(stored, 1, 0)[None] >= skip
            counts = counts & (apart | (position[b][:, None] >= where + skip))
            difference = (logits - lse[b, h][..., None]).clamp(min=-87)
            # With a log-sum-exp that is not of the pass, the result is unknown.
            difference = difference.masked_fill(difference > 1e-3, torch.nan)
            p = torch.where(counts, difference.exp(), 0.0)
            even = share / (position[b][:, None] + 1).double()
            for kind in kinds:
                low = high = p
                if kind == 1:
                    low = high = p**2
                elif kind == 2:
                    low = high = torch.where(counts & (p != 0), -p * difference, 0.0)
                elif kind == 3:
                    low, high = (p > even * 1.01 + 1e-5).double(), (p > even * 0.99 - 1e-5).double()
                    low, high = (x * counts for x in (low, high))
                    low = low.masked_fill(p.isnan(), torch.nan)
                for which, x in enumerate((low, high)):
                    if how == 3:
                        got = x.sum(1).amax(0)
                    elif how == 2:
                        got = x.amax(0).sum(0)
                    else:
                        got = x.sum((0, 1)) / (group if how == 1 else 1)
                    first = 0
                    for part, to in zip(parts, sums[which], strict=True):
                        to[term, b, h, part.slot] = got[first : first + len(part.slot)]
                        first += len(part.slot)
                term += 1
            first = 0
            for part, to in zip(parts, seen, strict=True):
                to[w, b, h, part.slot] = counts.sum(0)[first : first + len(part.slot)].double()
                first += len(part.slot)
    results = []
    for low, high, count in zip(*sums, seen, strict=True):
        wild = ~((low.abs() < LARGE) & (high.abs() < LARGE))
        if not orders:
            wild, count = torch.ones_like(wild), count * torch.nan
        results.append(
            Bounds(low.masked_fill(wild, torch.nan), high.masked_fill(wild, torch.nan), NEAR)
        )
        results.append(Bounds(count, count, EXACT))
    return results


def decode(q, position, tensors, numbers, watches, above, value_dim, scale, softcap, sinks, isa):
    given = (q, position, tensors, numbers, value_dim, scale, softcap, sinks)
    out, lse, table_rows = attention(*given)
    found = [unknown(out[:, :, :, 0], NEAR), Bounds(lse[..., 0], lse[..., 0], NEAR)]
    if not above:
        return found
    last = [1] * len(above)
    return found + observed(q, position, lse, table_rows, numbers, watches, above, last)


def prompt(q, position, tensors, numbers, watch, scored, value_dim, scale, softcap, sinks, isa):
    given = (q, position, tensors, numbers, value_dim, scale, softcap, sinks)
    out, lse, table_rows = attention(*given)
    near = {torch.bfloat16: 2e-2, torch.float16: 4e-3}.get(q.dtype, NEAR)
    # Products in bfloat16 round weights.
    values = max([_largest(x) for x in tensors if x.is_floating_point() and x.numel()] + [4])
    found = [unknown(out, near * values), Bounds(lse, lse, near * 4)]
    paged, widths = ([part[k] for part in each_of(numbers, PART)] for k in (0, 1))
    for i in range(scored if scored >= 0 else MOST):
        if at(paged, i):
            raise IndexError(f"part {i} is paged")
        largest = torch.zeros(*q.shape[:2], widths[i]).double()
        for (b, h), (_, logits, sees) in table_rows.items():
            p = (logits - lse[b, h][..., None]).exp().masked_fill(~sees, 0)
            mine = p[..., sum(widths[:i]) : sum(widths[: i + 1])]
            largest[b, h] = mine.amax((0, 1)) if mine.numel() else 0
        found.append(unknown(largest, near))
    if not watch:
        return found
    how, skip, count, *terms = (*watch, 0, 0, 0)[:4] if len(watch) < 4 else watch
    if scored or how == 2 or not 0 <= skip <= 1 or count != 1 or terms not in ([0], [1]):
        raise IndexError("watch")
    sums = observed(q, position, lse, table_rows, numbers, watch, [0.0], [q.shape[3]])
    # Kept weights of bfloat16 values are rounded.
    return found + [replace(x, near=near) if x.near == NEAR else x for x in sums]


def _largest(x: Tensor) -> float:
    """Return the largest magnitude; NaN, which is in no bounds, is ignored."""
    return float(x.masked_fill(x.isnan(), 0).abs().max())


def attention_mass(
    q, position, lse, tensors, numbers, watches, above, last, value_dim, scale, softcap, isa
):
    table_rows = {}
    if any(last):  # without queries nothing is observed or read
        _, _, table_rows = attention(q, position, tensors, numbers, value_dim, scale, softcap)
    return observed(q, position, lse.double(), table_rows, numbers, watches, above, last)


# Scores of tokens


def gate(key, value, position, layer, frequency, pairs, linear, inner, outer, first_head, isa):
    """Return the logarithms of scores; tokens and weights that are large are unknown."""
    found = torch.zeros(key.shape[:3]).double()
    sequences, heads, _, dim = key.shape
    for b in range(sequences):
        number = at(layer, b)
        at(range(len(linear)), number)
        rope = at(range(len(frequency)), number if len(frequency) > 1 else 0)
        x, y = key[b].double(), value[b].double()
        plain, norm = x.clone(), x.abs() * 2**0.5
        angles = position[b].clamp(min=0).float()[..., None] * frequency[rope]
        cosine, sine = angles.double().cos(), angles.double().sin()
        paired: set[int] = set()
        for k, (i, j) in enumerate(pairs[rope].tolist()):
            if (i, j) == (-1, -1):
                break
            i, j = at(range(dim), i), at(range(dim), j)
            if i == j or {i, j} & paired:
                raise IndexError("a dimension in two pairs")
            paired |= {i, j}
            plain[..., i] = x[..., i] * cosine[..., k] + x[..., j] * sine[..., k]
            plain[..., j] = x[..., j] * cosine[..., k] - x[..., i] * sine[..., k]
            norm[..., i] = norm[..., j] = torch.hypot(x[..., i], x[..., j])
        norms = torch.stack([z.square().sum(-1).sqrt() for z in (plain, y)], -1)
        rest = norms, (norms + 1e-6).log(), torch.ones_like(norms[..., :1])
        features = torch.cat((plain, y, norm, *rest), -1)
        for h in range(heads):
            of = at(range(linear.shape[1]), first_head + h)
            weights = [w[number, of].double() for w in (linear, inner, outer)]
            first, second, third = (w.masked_fill(~(w.abs() < LARGE), torch.nan) for w in weights)
            hidden = (features[h] @ second).relu() @ third
            large = ~(features[h].abs() < LARGE).all(-1)
            found[b, h] = (features[h] @ first + hidden).masked_fill(large, torch.nan)
    return [unknown(found, NEAR)]


# Pages


class Tier:
    def __init__(self, data: Tensor, table: Tensor, numbers: Sequence[int]) -> None:
        if len(each_of(numbers, TIER)) != 1:
            raise IndexError("numbers of a tier")
        self.data, self.table = data, table
        self.tokens, *self.places, self.score, self.position, self.reverse = numbers[:8]
        self.formats = formats_of(numbers, TIER)

    def locate(self, table_row: int, slot: int) -> tuple[Tensor, int]:
        if slot < 0:
            raise IndexError(f"slot {slot}")
        at(range(len(self.table)), table_row)
        row = self.table[table_row].flip(0) if self.reverse else self.table[table_row]
        number = at(row, slot // self.tokens)
        at(range(len(self.data)), number)
        return self.data[number], slot % self.tokens

    def segments(self) -> list[tuple[int, int]]:
        found = []
        for i, form in enumerate(self.formats):
            found.append((self.places[2 * i], form.bytes))
            if form.meta:
                found.append((self.places[2 * i + 1], form.meta))
        return found + [(place, 4) for place in (self.score, self.position) if place >= 0]

    def number(self, table_row: int, slot: int, offset: int, dtype: torch.dtype) -> Tensor:
        page, row = self.locate(table_row, slot)
        return span(page, offset, row, 4).clone().view(dtype)[0]

    def read(self, table_row: int, slot: int, which: int) -> Tensor:
        page, row = self.locate(table_row, slot)
        return vector(page, self.places[2 * which : 2 * which + 2], self.formats[which], row)

    def write(self, table_row: int, slot: int, vectors: Sequence[Tensor], score, position) -> None:
        page, row = self.locate(table_row, slot)
        for which, x in enumerate(vectors):
            form = self.formats[which]
            if len(x) != form.dim:
                raise IndexError("dimensions")
            codes = form.encode(x)
            if not form.is_codes:
                # The bits of a NaN are undefined: native code writes the quiet one.
                codes.view(DTYPES[form.number])[x.isnan()] = torch.nan
            span(page, self.places[2 * which], row, form.bytes).copy_(codes[: form.bytes])
            if form.meta:
                meta = span(page, self.places[2 * which + 1], row, form.meta)
                meta.copy_(codes[form.bytes :])
        if self.score >= 0:
            given = torch.tensor([float(score)]).view(torch.uint8)
            span(page, self.score, row, 4).copy_(given)
        if self.position >= 0:
            given = torch.tensor([int(position)], dtype=torch.int32).view(torch.uint8)
            span(page, self.position, row, 4).copy_(given)

    def move(self, table_row: int, source: int, target: int) -> None:
        page, row = self.locate(table_row, source)
        other, to = self.locate(table_row, target)
        for offset, width in self.segments():
            span(other, offset, to, width).copy_(span(page, offset, row, width).clone())


def lengths(tier: Tier, length: Tensor, table_rows: Tensor, slots: int) -> list[int]:
    found = [at(length, int(table_row)) for table_row in table_rows]
    if any(x < 0 for x in found) or slots < 0:
        raise IndexError("lengths")
    return [min(x, slots) for x in found]


def page_read(data, table, numbers, length, table_rows, start, slots, keys, values, isa):
    tier = Tier(data, table, numbers)
    at(range(MOST), slots)
    every = lengths(tier, length, table_rows, 2**62)
    first = [at(start, i) for i in range(len(every))]
    if any(not 0 <= each < 2**31 for each in first):
        raise IndexError("start")
    held = [max(0, min(all_of - each, slots)) for all_of, each in zip(every, first, strict=True)]
    count = len(held)
    found = [torch.zeros(count, slots).double()]
    extra: list[tuple[int, Tensor, torch.dtype]] = []
    if tier.score >= 0:
        extra.append((tier.score, torch.zeros(count, slots).double(), torch.float32))
    if tier.position >= 0:
        extra.append((tier.position, torch.full((count, slots), -1.0).double(), torch.int32))
    read = [
        (i, torch.zeros(count, slots, tier.formats[i].dim).double())
        for i, wanted in enumerate((keys, values))
        if wanted
    ]
    for i, table_row in enumerate(table_rows.tolist()):
        for slot in range(held[i]):
            found[0][i, slot] = 1
            for offset, to, dtype in extra:
                to[i, slot] = tier.number(table_row, first[i] + slot, offset, dtype).double()
            for which, to in read:
                to[i, slot] = tier.read(table_row, first[i] + slot, which)
    found += [to for _, to, _ in extra]
    return [exactly(x) for x in found] + [Bounds(x, x, 1e-5) for _, x in read]


def page_weakest(data, table, numbers, length, table_rows, slots, until):
    tier = Tier(data, table, numbers)
    held = lengths(tier, length, table_rows, slots)
    least, where = torch.full((len(held),), torch.inf).double(), torch.full((len(held),), -1.0)
    for i, table_row in enumerate(table_rows.tolist()):
        for slot in range(held[i]):
            score = float(tier.number(table_row, slot, tier.score, torch.float32))
            if len(until) and int(tier.number(table_row, slot, tier.position, torch.int32)) >= at(
                until, i
            ):
                continue
            now = float(least[i])
            if where[i] < 0 or ((score < now or score != score) and now == now):
                least[i], where[i] = score, slot
    return [exactly(least), exactly(where)]


def page_rescore(data, table, numbers, length, table_rows, score):
    tier = Tier(data, table, numbers)
    for i, held in enumerate(lengths(tier, length, table_rows, 2**62)):
        for slot in range(-(-held // tier.tokens) * tier.tokens):
            page, row = tier.locate(int(table_rows[i]), slot)
            new = float(score[i, slot]) if slot < score.shape[1] else 0.0
            span(page, tier.score, row, 4).copy_(torch.tensor([new]).view(torch.uint8))
    return []


def page_accumulate(data, table, numbers, length, table_rows, before, mass, seen, last, over):
    tier = Tier(data, table, numbers)
    for i, held in enumerate(lengths(tier, length, table_rows, 2**62)):
        table_row, tokens = int(table_rows[i]), at(before, i)
        for slot in range(-(-held // tier.tokens) * tier.tokens):
            page, row = tier.locate(table_row, slot)
            position = int(tier.number(table_row, slot, tier.position, torch.int32))
            old = tier.number(table_row, slot, tier.score, torch.float32)
            new = old
            if slot >= held:
                new = torch.tensor(0.0)
            elif tokens >= 0 and position >= 0:
                given = mass[i, at(range(mass.shape[1]), slot)]
                past = torch.tensor(
                    float(max(0, min(tokens - 1 - position, last if last >= 0 else 2**62)))
                )
                queries = (past + float(seen[i, slot])).clamp(min=1)
                new = old + given / float(over) if over > 0 else (old * past + given) / queries
            span(page, tier.score, row, 4).copy_(new[None].clone().view(torch.uint8))
    return []


def page_write(data, table, numbers, table_rows, start, keep, key, value, beside, isa):
    tier = Tier(data, table, numbers)
    rest = list(beside)
    score = rest.pop(0) if tier.score >= 0 else None
    position = rest.pop(0) if tier.position >= 0 else None
    for i in range(len(keep)):
        slot = at(start, i)
        for token in keep[i].nonzero()[:, 0].tolist():
            vectors = key[i, token], value[i, token]
            own = (None if x is None else x[i, token] for x in (score, position))
            tier.write(int(table_rows[i]), slot, vectors, *own)
            slot += 1
    return []


def page_place(data, numbers, page, slot, key, value, isa):
    pages, heads = Tier(data, page[:, None], numbers), key.shape[1]
    if pages.score >= 0 or pages.position >= 0:
        raise IndexError("scores or positions")
    for i in range(len(page)):
        vectors = (x[i // heads, i % heads] for x in (key, value))
        pages.write(i, at(range(numbers[0]), int(slot[i])), tuple(vectors), None, None)
    return []


def page_recode(
    data, table, numbers, table_rows, start, keep, other, source_table, source_numbers, rows, isa
):
    tier, source = Tier(data, table, numbers), Tier(other, source_table, source_numbers)
    tokens = []
    for i in range(len(keep)):
        row = int(rows[i])
        for count, slot in enumerate(keep[i].nonzero()[:, 0].tolist()):
            vectors = []
            for which in (0, 1):
                x, number = source.read(row, slot, which), source.formats[which].number
                vectors.append(x.to(DTYPES.get(number, torch.float32)))
            beside = [
                source.number(row, slot, where, dtype) if own >= 0 else None
                for own, where, dtype in (
                    (tier.score, source.score, torch.float32),
                    (tier.position, source.position, torch.int32),
                )
            ]
            tokens.append((int(table_rows[i]), at(start, i) + count, vectors, *beside))
    for token in tokens:
        tier.write(*token)
    return []


def page_compact(data, table, numbers, table_rows, stay):
    tier = Tier(data, table, numbers)
    for i in range(len(stay)):
        kept = int(stay[i].sum())
        source = [j for j in range(kept, stay.shape[1]) if stay[i, j]]
        target = [j for j in range(kept) if not stay[i, j]]
        for a, b in zip(source, target, strict=True):
            tier.move(int(table_rows[i]), a, b)
    return []


def page_copy(data, source, target):
    if len(source) != len(target):
        raise IndexError("targets")
    pages = [data[at(range(len(data)), int(i))].clone() for i in source]
    for page, to in zip(pages, target.tolist(), strict=True):
        data[at(range(len(data)), to)] = page
    return []


def _length(numbers: Sequence[int], tiers: int) -> int:
    """Return how many numbers some tiers have."""
    size, kinds = TIER
    end = 0
    for _ in range(tiers):
        here = numbers[end:]
        end += size + sum(_levels(*here[kind : kind + 3]) for kind in kinds)
    return end


def page_step(data, ring, start, free, tensors, numbers, poison, isa):
    pages, works, rest, given = len(data), [], list(tensors), list(numbers)
    while given:
        count = given.pop(0)
        own, rest = rest[: 8 + 2 * count], rest[8 + 2 * count :]
        each = each_of(given[: _length(given, count)], TIER)
        tiers = [(Tier(data, own[8 + 2 * t], each[t]), own[9 + 2 * t]) for t in range(count)]
        given = given[sum(map(len, each)) :]
        works.append((own, tiers))
    gone, taken = [], []
    for w, (own, tiers) in enumerate(works):
        candidate, victim, target, place = own[:4]
        for i in range(len(candidate)):
            t, to, into = int(victim[i]), int(target[i]), int(candidate[i])
            slot = int(place[t, i]) if t < len(tiers) else -1
            moving = None
            entering = into if into < len(tiers) else None
            end = {k: int(x[1][i]) for k, x in enumerate(tiers)}
            if slot >= 0:
                tier = tiers[t][0]
                if t < to < len(tiers):
                    vectors = [tier.read(i, slot, which).float() for which in (0, 1)]
                    beside = [
                        tier.number(i, slot, where, dtype) if where >= 0 else None
                        for where, dtype in (
                            (tier.score, torch.float32),
                            (tier.position, torch.int32),
                        )
                    ]
                    moving = to, vectors, beside
                if entering != t:
                    end[t] -= 1
                    tier.move(i, end[t], slot)
                    if end[t] % tier.tokens == 0:
                        gone.append((w, t, tier, i, end[t]))
            swap = slot if slot >= 0 and entering == t else None
            taken.append((own, tiers, i, moving, entering, swap, end))

    def entry(tier: Tier, i: int, slot: int) -> tuple[int, int]:
        column = slot // tier.tokens
        at(range(tier.table.shape[1]), column)
        return i, tier.table.shape[1] - 1 - column if tier.reverse else column

    for *_, tier, i, slot in sorted(gone, key=lambda each: each[:2]):
        page = int(tier.table[entry(tier, i, slot)])
        ring[(int(start) + int(free)) % pages] = page
        free += 1
        if poison:
            data[page] = 255
    for own, tiers in works:
        mine = [x for x in taken if x[0] is own]
        for t, (tier, _) in enumerate(tiers):
            for arriving in (True, False):
                for _, _, i, moving, entering, swap, end in mine:
                    arrives = moving is not None and moving[0] == t
                    slot = end[t] if arriving else end[t] + arrives
                    comes = arrives if arriving else entering == t and swap is None
                    if comes and slot % tier.tokens == 0:
                        if int(free) < 1:
                            raise IndexError("no page is free")
                        tier.table[entry(tier, i, slot)] = ring[int(start)]
                        start.copy_((start + 1) % pages)
                        free -= 1
    for own, tiers, i, moving, entering, swap, end in taken:
        if moving is not None:
            t, vectors, beside = moving
            tiers[t][0].write(i, end[t], vectors, *beside)
            end[t] += 1
        if entering is not None:
            vectors = own[4][i, 0], own[5][i, 0]
            tier = tiers[entering][0]
            beside = [
                own[k][i] if w >= 0 else None for k, w in ((6, tier.score), (7, tier.position))
            ]
            tier.write(i, end[entering] if swap is None else swap, vectors, *beside)
            end[entering] += swap is None
        for t, (_, length) in enumerate(tiers):
            length[i] = end[t]
    return []
