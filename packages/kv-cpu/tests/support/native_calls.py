"""Random calls of the native operators: valid ones, and modified ones."""

import ctypes
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

import torch
from torch import Tensor

from kv_policy import PlaneLayout
from kv_policy.described import LEVELS, NUMBERS
from native_judge import PART, each_of

PAGE: Final = mmap.PAGESIZE
SLOT: Final = 32 * PAGE  # maximum size of a tensor
CANARY: Final = 0xA5
DTYPES: Final = {number: dtype for dtype, number in NUMBERS.items()}
Arg = Tensor | None | int | float | str | list  # lists of any of these


class Arena:
    """Memory for tensors that end at an inaccessible page.

    The bytes before a tensor are `CANARY`.
    """

    def __init__(self, slots: int = 96) -> None:
        size = slots * (SLOT + PAGE)
        self._map = mmap.mmap(-1, size, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        self._slots: list[Tensor] = []
        for i in range(slots):
            first = start + i * (SLOT + PAGE)
            if protect(ctypes.c_void_p(first + SLOT), ctypes.c_size_t(PAGE), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
            raw = (ctypes.c_uint8 * SLOT).from_address(first)
            self._slots.append(torch.frombuffer(raw, dtype=torch.uint8))
        self._taken: list[int] = []

    def clear(self) -> None:
        self._taken = []

    def put(self, x: Tensor) -> Tensor:
        """Copy a tensor, including its strides, to a separate slot."""
        size = x.element_size()
        reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
        nbytes = 0 if x.numel() == 0 else reach * size
        if nbytes > SLOT - PAGE or len(self._taken) == len(self._slots):
            return x
        slot = self._slots[len(self._taken)]
        self._taken.append(nbytes)
        slot[SLOT - nbytes - min(PAGE, SLOT - nbytes) : SLOT].fill_(CANARY)
        if nbytes == 0:
            return x
        placed = slot[SLOT - nbytes :].view(x.dtype).as_strided(x.shape, x.stride())
        if 0 in x.stride():  # repeated elements are written once
            first = tuple(slice(0, 1) if s == 0 else slice(None) for s in x.stride())
            placed[first].copy_(x[first])
        else:
            placed.copy_(x)
        return placed

    def spoilt(self) -> bool:
        """Whether a byte before a tensor has changed."""
        for slot, nbytes in zip(self._slots, self._taken, strict=False):
            if not bool((slot[SLOT - nbytes - PAGE : SLOT - nbytes] == CANARY).all()):
                return True
        return False


def bytes_of(x: Tensor) -> Tensor:
    """Return a tensor's elements as bytes, to compare NaN bitwise."""
    if x.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    return x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


@dataclass(frozen=True)
class Call:
    """A call, and whether one of its tensors has no memory."""

    name: str
    args: list[Arg]
    hopeless: bool = False
    bent: tuple[str, ...] = ()

    @property
    def full(self) -> bool:
        """Whether none of the first tensors is empty, and the first part of attention is paged."""
        lists = [arg for arg in self.args if isinstance(arg, list)]
        attends = not self.name.startswith("page_") and self.name != "gate"
        if attends and (not lists[1] or not lists[1][0]):
            return False
        first = [
            x
            for x in (*self.args[:7], *(x for arg in lists[:1] for x in arg[:4]))
            if isinstance(x, Tensor)
        ]
        return all(x.numel() for x in first)


@dataclass
class Maker:
    """Draws random calls."""

    random: Random
    isas: tuple[str, ...]
    generator: torch.Generator = field(default_factory=torch.Generator)

    def __post_init__(self) -> None:
        self.generator.manual_seed(self.random.getrandbits(32))

    def call(self) -> Call:
        names: dict[str, Callable[[], list[Arg]]] = {
            "decode": self.decode,
            "decode_rows": self.decode_rows,
            "prompt": self.prompt,
            "attention_mass": self.attention_mass,
            "page_read": self.page_read,
            "page_weakest": self.page_weakest,
            "page_rescore": self.page_rescore,
            "page_accumulate": self.page_accumulate,
            "page_write": self.page_write,
            "page_place": self.page_place,
            "page_recode": self.page_recode,
            "page_compact": self.page_compact,
            "page_copy": self.page_copy,
            "page_step": self.page_step,
            "gate": self.gate,
        }
        name = self.random.choice(list(names))
        return Call(name, names[name]())

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=self.generator).to(dtype)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype)

    def either(self) -> torch.dtype:
        return self.random.choice([torch.int32, torch.int64])

    def floating(self) -> torch.dtype:
        return self.random.choice(list(NUMBERS))

    def format(self, dim: int) -> list[int]:
        number = self.random.choice([0, 0, 0, 1, 2, 3, LEVELS])
        if number == LEVELS:
            return [number, dim, self.random.randint(1, 4), self.random.randint(dim, dim + 2)]
        if number:
            return [number, dim, 0, 1]
        return [0, dim, self.random.choice([1, 2, 3, 4, 8]), self.random.randint(1, dim + 2)]

    def levels(self, formats: list[list[int]]) -> list[int]:
        """Return ascending levels of codes, as the bits of float64 numbers."""
        found: list[float] = []
        for number, _, bits, _ in formats:
            if number == LEVELS:
                found += sorted(self.random.uniform(-3, 3) for _ in range(2**bits))
        return list(struct.unpack(f"={len(found)}q", struct.pack(f"={len(found)}d", *found)))

    def dim(self) -> int:
        return self.random.choice([1, 3, 8, 16, 17, 20, 33, 64])

    def sides(self) -> tuple[int, int, list[int], list[int]]:
        key, value = self.dim(), self.dim()
        return key, value, self.format(key), self.format(value)

    def pages(self, tokens: int, formats: list[list[int]], more: int) -> tuple[Tensor, list[int]]:
        """Return pages, and the offsets of codes, metadata and `more` rows of 4 bytes."""
        pages, columns, places = 6, [], []
        at = 0

        def lay(block: Tensor, used: bool = True) -> None:
            nonlocal at
            places.append(at if used else 0)
            if used:
                columns.append(block.reshape(pages, -1).view(torch.uint8))
                at += columns[-1].shape[1]

        for number, dim, bits, group in formats:
            if number in DTYPES:
                lay(self.normal(pages, tokens, dim, dtype=DTYPES[number]))
                lay(torch.empty(0), used=False)
                continue
            planes = PlaneLayout(dim, bits, group)
            lay(self.integers(0, 256, pages, tokens * planes.stride, dtype=torch.uint8))
            scale = torch.rand(pages, tokens, 1, planes.groups, generator=self.generator)
            zero = self.normal(pages, tokens, 1, planes.groups)
            lay((torch.cat((scale / 2**bits, zero), dim=2) if number == 0 else scale).half())
        for _ in range(more):
            lay(self.integers(-1, 40, pages, tokens, dtype=torch.int32))
        columns.append(self.integers(0, 256, pages, self.random.randint(0, 9), dtype=torch.uint8))
        return torch.cat(columns, dim=1), places

    def tier(self, table_rows: int, more: tuple[bool, bool], dims: tuple[int, int] | None = None):
        """Return the pages, the table, the numbers and the lengths of a tier."""
        key, value = dims or (self.dim(), self.dim())
        formats = [self.format(key), self.format(value)]
        tokens, width = self.random.randint(1, 5), self.random.randint(1, 4)
        data, places = self.pages(tokens, formats, sum(more))
        rest = iter(places[4:])
        score, position = (next(rest) if here else -1 for here in more)
        if score >= 0:
            scores = self.normal(6, tokens).view(torch.uint8)
            data[:, score : score + 4 * tokens] = scores
        numbers = [tokens, *places[:4], score, position, self.random.randint(0, 1)]
        numbers += [*formats[0], *formats[1], *self.levels(formats)]
        table = self.integers(0, 6, table_rows, width, dtype=self.either())
        length = self.integers(0, tokens * width + 1, table_rows, dtype=self.either())
        return data, table, numbers, length

    def part(self, q: Tensor, value_dim: int, watched: bool) -> tuple[list[Tensor], list[int]]:
        sequences, heads, dim = q.shape[0], q.shape[1], q.shape[-1]
        if self.random.random() < 0.4:
            width = self.random.randint(0, 12)
            sizes = (sequences, heads, width)
            kinds = [self.random.choice(list(NUMBERS.values())) for _ in "kv"]
            key = self.normal(*sizes, dim, dtype=DTYPES[kinds[0]])
            value = self.normal(*sizes, value_dim, dtype=DTYPES[kinds[1]])
            place = self.integers(-1, 40, sequences, width)
            formats = [kinds[0], dim, 0, 1, kinds[1], value_dim, 0, 1]
            return [key, value, place, place], [0, width, *formats, 1, *[0] * 7, 1, 1]
        holes = self.random.random() < 0.3
        formats = [self.format(dim), self.format(value_dim)]
        tokens, columns = self.random.randint(1, 5), self.random.randint(0, 4)
        share = [1, 1]
        if self.random.random() < 0.3:  # blocks of tokens with the same scales
            tokens = self.random.choice([2, 4, 6])
            share = [self.random.choice([1, 2, tokens]) if not form[0] else 1 for form in formats]
            if formats[0][0] == 0 and self.random.random() < 0.7:
                formats[0][3] = 1
        data, places = self.pages(tokens, formats, int(holes))
        table = self.integers(0, 6, sequences, heads, columns, dtype=self.either())
        length = self.integers(0, tokens * columns + 1, sequences, heads, dtype=self.either())
        width = tokens * columns if watched else 0
        place = self.integers(0, 30, sequences, heads, width + self.random.randint(0, 2))
        numbers = [1, width, *formats[0], *formats[1], 1, tokens, *places[:4]]
        numbers += [places[4] if holes else -1, self.random.randint(0, 1), *share]
        numbers += self.levels(formats)
        return [data, table, length, place], numbers

    def scored(self, q: Tensor, value_dim: int) -> tuple[list[Tensor], list[int], list[int]]:
        """Return parts in pages of their own with scores, and how these are updated."""
        rows = q.shape[0] * q.shape[1]
        tensors, numbers = [], []
        running = [self.random.choice([-1, 0, 5]), self.random.choice([0, 0, 3])]
        for _ in range(self.random.randint(1, 2)):
            formats = [self.format(q.shape[-1]), self.format(value_dim)]
            tokens, columns = self.random.randint(1, 5), self.random.randint(0, 6 // rows)
            data, places = self.pages(tokens, formats, 2)
            score, position = places[4:]
            data[:, score : score + 4 * tokens] = self.normal(6, tokens).view(torch.uint8)
            table = torch.randperm(6, generator=self.generator)[: rows * columns]
            table = table.view(*q.shape[:2], columns).to(self.either())
            length = self.integers(0, tokens * columns + 1, *q.shape[:2], dtype=self.either())
            width = tokens * columns
            place = self.integers(-1, 30, *q.shape[:2], width + self.random.randint(0, 2))
            holes, given = self.random.random() < 0.3, self.random.random() < 0.5
            numbers += [1, width, *formats[0], *formats[1], 1, tokens, *places[:4]]
            numbers += [position if holes else -1, self.random.randint(0, 1), 1, 1]
            numbers += self.levels(formats)
            tensors += [data, table, length, place]
            running += [score, -1 if given else position]
        return tensors, numbers, running

    def pad(self, position: Tensor, tensors: list[Tensor], numbers: list[int]) -> None:
        """Sometimes make the last sequence one of padding, whose table has no page numbers."""
        if self.random.random() >= 0.2:
            return
        position[-1] = -1
        for i, part in enumerate(each_of(numbers, PART)):
            if part[0]:
                tensors[4 * i + 1][-1] = self.random.choice([-1, 6, 2**31 - 1])

    def pass_over(self, length: int, watched: bool):
        sequences, heads, group = (self.random.randint(1, 2) for _ in "BHG")
        value_dim = self.dim()
        shape = (sequences, heads, group, length, self.dim())
        q = self.normal(*shape, dtype=self.floating())
        if self.random.random() < 0.3:
            q = q.transpose(1, 2).contiguous().transpose(1, 2)
        position = self.integers(30, 45, sequences, length).sort(dim=1).values
        if length > 1:
            position[0, 0] = -1
        tensors: list[Tensor] = []
        numbers: list[int] = []
        for _ in range(self.random.randint(0, 3)):
            more, few = self.part(q, value_dim, watched)
            tensors += more
            numbers += few
        self.pad(position, tensors, numbers)
        return q, position, tensors, numbers, value_dim

    def watches(self, many: bool) -> tuple[list[int], list[float]]:
        numbers, above = [], []
        for _ in range(self.random.randint(int(many), 2)):
            terms = [self.random.randint(0, 3) for _ in range(self.random.randint(1, 3))]
            group = self.random.randint(0, 3)
            numbers += [group, self.random.randint(0, 3), len(terms), *terms]
            above.append(self.random.choice([0.0, 1.0]))
        return numbers, above

    def softmax(self, q: Tensor) -> tuple[float, list[Tensor]]:
        sinks = [1 + self.normal(*q.shape[1:3])] if self.random.random() < 0.5 else []
        return self.random.choice([0.0, 1.5]), sinks

    def decode(self) -> list[Arg]:
        q, position, tensors, parts, value_dim = self.pass_over(1, True)
        numbers, above = self.watches(False)
        isa = self.random.choice(self.isas)
        softmax = self.softmax(q)
        return [q, position, tensors, parts, numbers, above, value_dim, 0.2, *softmax, isa]

    def decode_rows(self) -> list[Arg]:
        sequences, heads, group = (self.random.randint(1, 2) for _ in "BHG")
        key_dim, value_dim, first = self.dim(), self.dim(), self.random.randint(0, 2)
        rows = first + sequences + self.random.randint(0, 1)
        maps, kinds, dims = self.maps(heads, key_dim, value_dim)
        sizes = zip((heads, heads * group, heads, heads * group), dims, strict=True)
        given = [self.normal(rows, n, dim, dtype=self.floating()) for n, dim in sizes]
        key, q, value, out = given
        position = self.integers(30, 45, sequences, 1)
        by_head = self.normal(sequences, heads, group, 1, key_dim, dtype=q.dtype)
        tensors: list[Tensor] = []
        parts: list[int] = []
        for _ in range(self.random.randint(0, 2)):
            more, few = self.part(by_head, value_dim, True)
            tensors += more
            parts += few
        watches, running = self.watches(False), []
        if tensors and self.random.random() < 0.5:
            tensors, parts, running = self.scored(by_head, value_dim)
            term, group = self.random.randint(0, 2), self.random.randint(0, 3)
            watches = [group, self.random.randint(0, 1), 1, term], [0.0]
        self.pad(position, tensors, parts)
        store: list[Tensor] = []
        tier: list[int] = []
        if self.random.random() < 0.6:
            data, _, tier, _ = self.tier(1, (False, False), (key_dim, value_dim))
            count = heads * self.random.randint(0, min(rows, 6 * tier[0] // heads))
            where = torch.randperm(6 * tier[0], generator=self.generator)[:count]
            page, slot = where // tier[0], where % tier[0]
            store = [data, page.to(self.either()), slot.to(self.either())]
        copies: list[Tensor] = []
        if self.random.random() < 0.5:
            stored = (key, key_dim), (value, value_dim)
            copies = [torch.zeros(sequences, heads, dim, dtype=x.dtype) for x, dim in stored]
        softcap, sinks = self.softmax(by_head)
        groups: list[int] = []
        if self.random.random() < 0.3:
            watches, running, store, tier = ([], []), [], [], []
            tensors, parts, groups = self.groups(by_head, value_dim)
            self.pad(position, tensors, parts)
        isa = self.random.choice(self.isas)
        first_args = (q, key, value, position, out, first, tensors, parts)
        more = (running, groups, 0.2, softcap, sinks, store, tier, copies, maps, kinds, isa)
        return [*first_args, *watches, *more]

    def groups(self, q: Tensor, value_dim: int) -> tuple[list[Tensor], list[int], list[int]]:
        """Return parts of groups of heads whose vectors have dimensions of their own."""
        tensors: list[Tensor] = []
        numbers: list[int] = []
        groups: list[int] = []
        heads = torch.randperm(q.shape[1], generator=self.generator).tolist()
        while heads:
            count = self.random.randint(1, len(heads))
            dims = self.random.randint(1, q.shape[-1]), self.random.randint(1, value_dim)
            own = q[:, heads[:count], ..., : dims[0]]
            given = [self.part(own, dims[1], False) for _ in range(self.random.randint(0, 2))]
            paged = [(more, few) for more, few in given if few[0]]
            for more, few in paged:
                tensors += more
                numbers += few
            groups += [count, *dims, len(paged), *heads[:count]]
            heads = heads[count:]
        return tensors, numbers, groups

    def maps(self, heads: int, key_dim: int, value_dim: int) -> tuple[list[Arg], list[int], list]:
        """Return maps of some vectors, their kinds, and dimensions of what is given.

        Products of keys, queries and values have one summand, so that stored bytes are known.
        """
        dims = [key_dim, key_dim, value_dim, value_dim]
        maps: list[Arg] = []
        kinds: list[int] = []
        if self.random.random() < 0.4:
            return maps, kinds, dims
        for kind, stored in enumerate(dims):
            if self.random.random() < 0.3:
                continue
            dims[kind] = self.random.choice([stored, self.dim()])
            given, lead = dims[kind], self.random.choice([(), (heads,)])
            if kind == 3:
                matrix = self.normal(*lead, stored, given) / stored**0.5
            else:
                one = self.integers(0, given, *lead, 1, stored)
                numbers = self.integers(1, 8, *lead, 1, stored) / 4
                matrix = torch.zeros(*lead, given, stored).scatter_(-2, one, numbers)
            if self.random.random() < 0.5:
                matrix = matrix.mT.contiguous().mT
            maps.append(matrix.to(self.floating()))
            kinds.append(kind)
        if 0 in kinds and self.random.random() < 0.5:
            maps.append(self.normal(heads, dims[0], dtype=self.floating()))
            kinds.append(4)
        return maps, kinds, dims

    def prompt(self) -> list[Arg]:
        length = self.random.choice([1, 2, 9, 30])
        one = self.random.choice([0, 1, 3]), self.random.randint(0, 1), 1, self.random.randint(0, 1)
        watch = self.random.choice([[], [*one]])
        q, position, tensors, parts, value_dim = self.pass_over(length, bool(watch))
        paged = [part[0] for part in each_of(parts, PART)]
        first = paged.index(1) if 1 in paged else len(paged)
        scored = 0 if watch else self.random.randint(0, first)  # parts before the first paged one
        isa = self.random.choice(self.isas)
        softmax = self.softmax(q)
        return [q, position, tensors, parts, watch, scored, value_dim, 0.2, *softmax, isa]

    def attention_mass(self) -> list[Arg]:
        length = self.random.choice([1, 2, 9, 30])
        q, position, tensors, parts, value_dim = self.pass_over(length, True)
        numbers, above = self.watches(True)
        lse = 3 + self.normal(*q.shape[:-1]).abs()
        last = [self.random.randint(0, length + 1) for _ in above]
        isa = self.random.choice(self.isas)
        softcap, _ = self.softmax(q)
        more = (value_dim, 0.2, softcap, isa)
        return [q, position, lse, tensors, parts, numbers, above, last, *more]

    def table_rows(self, of: int) -> Tensor:
        some = torch.randperm(of, generator=self.generator)[: self.random.randint(0, of)]
        return some.to(self.either())

    def page_read(self) -> list[Arg]:
        more = (self.random.random() < 0.5, self.random.random() < 0.5)
        data, table, numbers, length = self.tier(3, more)
        slots = self.random.randint(0, numbers[0] * table.shape[1])
        keys, values = self.random.random() < 0.5, self.random.random() < 0.5
        isa = self.random.choice(self.isas)
        table_rows = self.table_rows(3)
        start = self.integers(0, slots + 2, len(table_rows), dtype=self.either())
        return [data, table, numbers, length, table_rows, start, slots, keys, values, isa]

    def page_weakest(self) -> list[Arg]:
        data, table, numbers, length = self.tier(3, (True, True))
        slots, table_rows = self.random.randint(0, numbers[0] * table.shape[1]), self.table_rows(3)
        until = self.integers(0, 40, self.random.choice([0, len(table_rows)]), dtype=self.either())
        return [data, table, numbers, length, table_rows, slots, until]

    def page_rescore(self) -> list[Arg]:
        data, table, numbers, length = self.tier(3, (True, self.random.random() < 0.5))
        table_rows = self.table_rows(3)
        score = self.normal(len(table_rows), self.random.randint(0, 20))
        return [data, table, numbers, length, table_rows, score]

    def page_accumulate(self) -> list[Arg]:
        data, table, numbers, length = self.tier(3, (True, True))
        table_rows, room = self.table_rows(3), numbers[0] * table.shape[1]
        columns = room + self.random.randint(0, 2)
        before = self.integers(-1, 50, len(table_rows), dtype=self.either())
        mass = self.normal(len(table_rows), columns).abs()
        seen = self.integers(0, 9, len(table_rows), columns, dtype=self.either())
        last, over = self.random.choice([(-1, 0), (5, 0), (-1, 4), (0, 0)])
        return [data, table, numbers, length, table_rows, before, mass, seen, last, over]

    def page_write(self) -> list[Arg]:
        more = (self.random.random() < 0.5, self.random.random() < 0.5)
        data, table, numbers, _ = self.tier(3, more)
        table = torch.arange(6).view(3, 2)[:, :1].contiguous().to(table.dtype)  # one page each
        table_rows, room = self.table_rows(3), numbers[0] * table.shape[1]
        columns = self.random.randint(0, room)
        start = self.integers(0, room - columns + 1, len(table_rows), dtype=self.either())
        keep = self.integers(0, 2, len(table_rows), columns).bool()
        key = self.normal(len(table_rows), columns, numbers[9], dtype=self.floating())
        value = self.normal(len(table_rows), columns, numbers[13], dtype=self.floating())
        beside = [self.normal(len(table_rows), columns)] if more[0] else []
        if more[1]:
            beside.append(self.integers(0, 99, len(table_rows), columns, dtype=self.either()))
        isa = self.random.choice(self.isas)
        return [data, table, numbers, table_rows, start, keep, key, value, beside, isa]

    def page_place(self) -> list[Arg]:
        data, _, numbers, _ = self.tier(1, (False, False))
        heads, tokens = self.random.randint(1, 3), numbers[0]
        count = self.random.randint(0, 6 * tokens // heads)
        where = torch.randperm(6 * tokens, generator=self.generator)[: count * heads]
        if self.random.random() < 0.7:  # tokens of a head in consecutive slots
            count = min(count, tokens)
            first = torch.randperm(6, generator=self.generator)[:heads] * tokens
            where = (first + torch.arange(count)[:, None]).flatten()
        page, slot = (x.to(self.either()) for x in (where // tokens, where % tokens))
        rows = count + self.random.randint(0, 2)
        key = self.normal(rows, heads, numbers[9], dtype=self.floating())
        value = self.normal(rows, heads, numbers[13], dtype=self.floating())
        return [data, numbers, page, slot, key, value, self.random.choice(self.isas)]

    def page_recode(self) -> list[Arg]:
        more, dims = (self.random.random() < 0.5, self.random.random() < 0.5), (self.dim(),) * 2
        data, table, numbers, _ = self.tier(3, more, dims)
        other, source_table, source, _ = self.tier(2, (True, True), dims)
        table = torch.arange(6).view(3, 2)[:, :1].contiguous().to(table.dtype)  # one page each
        if self.random.random() < 0.4:  # both tiers in one pool, in pages of their own
            size = max(data.shape[1], other.shape[1])
            whole = self.integers(0, 256, 12, size, dtype=torch.uint8)
            whole[:6, : data.shape[1]], whole[6:, : other.shape[1]] = data, other
            data = other = whole
            source_table = source_table + 6
        table_rows = self.table_rows(3)
        room = min(numbers[0], source[0] * source_table.shape[1])
        columns = self.random.randint(0, room)
        start = self.integers(0, numbers[0] - columns + 1, len(table_rows), dtype=self.either())
        keep = self.integers(0, 2, len(table_rows), columns).bool()
        rows = self.integers(0, 2, len(table_rows), dtype=self.either())
        target = [data, table, numbers, table_rows, start, keep]
        return [*target, other, source_table, source, rows, self.random.choice(self.isas)]

    def page_compact(self) -> list[Arg]:
        data, table, numbers, _ = self.tier(3, (self.random.random() < 0.5, False))
        table = torch.arange(6).view(3, 2).to(table.dtype)
        table_rows = self.table_rows(3)
        columns = self.random.randint(0, numbers[0] * 2)
        return [
            data,
            table,
            numbers,
            table_rows,
            self.integers(0, 2, len(table_rows), columns).bool(),
        ]

    def page_copy(self) -> list[Arg]:
        order = torch.randperm(6, generator=self.generator)
        count, dtype = self.random.randint(0, 3), self.either()
        data = self.integers(0, 256, 6, self.random.randint(1, 40), dtype=torch.uint8)
        return [data, order[:count].to(dtype), order[3 : 3 + count].to(dtype)]

    def page_step(self) -> list[Arg]:
        more = (self.random.random() < 0.5, self.random.random() < 0.5)
        dims, table_rows = (self.dim(), self.dim()), 2
        tiers: list[tuple[Tensor, Tensor, list[int], Tensor]] = []
        while len(tiers) < 2:
            tier = self.tier(table_rows, more, dims)
            if tier[2][0] * tier[1].shape[1] > 1:  # two tokens may enter it
                tiers.append(tier)
        size = max(tier[0].shape[1] for tier in tiers)
        data = self.integers(0, 256, 12, size, dtype=torch.uint8)
        for half, tier in enumerate(tiers):
            data[6 * half : 6 * half + 6, : tier[0].shape[1]] = tier[0]
        tensors: list[Tensor] = []
        kinds = [self.integers(0, high, table_rows, dtype=torch.uint8) for high in (3, 3, 3)]
        lengths, tables = [], []
        for half, (_, table, numbers, _) in enumerate(tiers):
            room = numbers[0] * table.shape[1]
            lengths.append(self.integers(0, max(room - 1, 1), table_rows, dtype=torch.int32))
            order = 3 * half + torch.arange(table_rows)[:, None].expand(-1, table.shape[1])
            tables.append(order.contiguous().int())
        place = torch.stack([x.long() - 1 for x in lengths]).clamp(min=-1)
        token = [self.normal(table_rows, 1, dim, dtype=self.floating()) for dim in dims]
        score = self.normal(table_rows) if more[0] else torch.empty(0)
        position = self.integers(0, 90, table_rows) if more[1] else torch.empty(0).long()
        tensors += [*kinds, place, *token, score, position]
        numbers = [2]
        for table, length, tier in zip(tables, lengths, tiers, strict=True):
            tensors += [table, length]
            numbers += tier[2]
        ring = torch.cat((torch.arange(6, 12), torch.zeros(7))).int()
        start, free = torch.tensor([0]), torch.tensor([6])
        poison = self.random.random() < 0.5
        isa = self.random.choice(self.isas)
        return [data, ring, start, free, tensors, numbers, poison, isa]

    def gate(self) -> list[Arg]:
        sequences, heads, layers = (self.random.randint(1, 3) for _ in "BHN")
        length, units = self.random.choice([0, 1, 5, 14, 110]), self.random.choice([0, 1, 16, 33])
        dims, first = (self.dim(), self.dim()), self.random.randint(0, 2)
        lead = (layers, first + heads + self.random.randint(0, 1), 2 * dims[0] + dims[1] + 5)
        sizes = (sequences, heads, length)
        vectors = [self.normal(*sizes, dim, dtype=self.floating()) for dim in dims]
        if self.random.random() < 0.3:
            vectors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in vectors]
        shared = self.random.random() < 0.5
        place = self.integers(-1, 9999, sequences, 1 if shared else heads, length)
        ropes, count = self.random.choice([1, layers]), self.random.randint(0, dims[0] // 2)
        half = torch.stack((torch.arange(count), torch.arange(count) + dims[0] // 2), dim=-1)
        mixed = torch.randperm(dims[0], generator=self.generator)[: 2 * count].view(count, 2)
        pairs = self.random.choice([half, mixed]).expand(ropes, -1, -1).clone()
        if count > 1:
            pairs[0, -1] = -1
        return [
            *vectors,
            place.to(self.either()).expand(sizes),
            self.integers(0, layers, sequences, dtype=self.either()),
            torch.rand(ropes, count, generator=self.generator),
            pairs.to(self.either()),
            self.normal(*lead) * 0.2,
            self.normal(*lead, units) * 0.2,
            self.normal(*lead[:2], units) * 0.2,
            first,
            self.random.choice(self.isas),
        ]


WILD: Final = (-(2**63), -(2**62), -(2**31), -2, -1, 0, 1, 2, 3, 5, 7, 255, 1024, 1025, 2**31 - 1)
WILD += (2**31, 2**32, 2**60, 2**61, 2**62, 2**63 - 8, 2**63 - 1)
OTHERS: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16)
OTHERS += (torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.complex64)


def bend(call: Call, random: Random) -> Call:
    """Change one argument, or a number or a tensor in it."""
    args = [list(arg) if isinstance(arg, list) else arg for arg in call.args]
    which = random.randrange(len(args))
    arg = args[which]
    hopeless, what = call.hopeless, "?"
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    tensors += [x for arg in args if isinstance(arg, list) for x in arg if isinstance(x, Tensor)]
    if isinstance(arg, list) and (not arg or random.random() < 0.15):
        if arg and random.random() < 0.5:
            at = random.randrange(len(arg))
            what = f"without its item {at}"
            del arg[at]
        else:
            at = random.randint(0, len(arg))
            more: Arg = random.choice(arg or [random.choice(WILD)])
            if not arg and which == 2:
                more = random.choice(tensors)
            arg.insert(at, more)
            what = f"with another item {at}"
    elif isinstance(arg, list):
        at = random.randrange(len(arg))
        arg[at], hopeless, what = _bent(arg[at], tensors, random, hopeless)
        what = f"{what} at {at}"
    else:
        args[which], hopeless, what = _bent(arg, tensors, random, hopeless)
    return replace(call, args=args, hopeless=hopeless, bent=(*call.bent, f"{which}: {what}"))


def _bent(arg: Arg, tensors: list[Tensor], random: Random, hopeless: bool) -> tuple[Arg, bool, str]:
    if isinstance(arg, bool):
        return not arg, hopeless, "the other"
    if isinstance(arg, int):
        value = random.choice(WILD) if random.random() < 0.7 else arg + random.choice([-1, 1])
        value = max(-(2**63), min(value, 2**63 - 1))
        return value, hopeless, f"{arg} is {value}"
    if isinstance(arg, float):
        value = random.choice([0.0, -1.0, 1e300, float("nan"), float("inf"), float("-inf")])
        return value, hopeless, f"{arg} is {value}"
    if isinstance(arg, str):
        value = random.choice(["", "mmx", arg + "\0", arg + " ", "plain", "x" * 1000])
        return value, hopeless, f"{arg!r} is {value[:10]!r}"
    if arg is None or hopeless:
        return arg, hopeless, "as it was"
    return _bent_tensor(arg, tensors, random)


def _bent_tensor(
    x: Tensor, tensors: list[Tensor], random: Random
) -> tuple[Tensor | None, bool, str]:
    how = random.randrange(15)
    if how <= 3 and x.numel():
        x = x.clone()
        at = random.randrange(x.numel())
        index: tuple[int, ...] = ()
        for size in reversed(x.shape):
            index, at = (at % size, *index), at // size
        if x.is_floating_point():
            value = random.choice([0.0, 1e30, float("nan"), float("inf"), -60000.0])
        elif x.dtype == torch.bool or x.is_complex():
            value = random.randint(0, 1)
        else:
            info = torch.iinfo(x.dtype)
            value = max(info.min, min(random.choice(WILD), info.max))
        x[index] = value
        return x, False, f"{index} is {value}"
    if how == 4:
        dtype = random.choice(OTHERS)
        return x.to(dtype), False, f"in {dtype}"
    if how <= 6 and x.dim():
        d, size = random.randrange(x.dim()), x.shape
        more = max(0, random.choice([0, size[d] - 1, size[d] + 1, size[d] * 2]))
        index = torch.arange(more) % max(size[d], 1)
        x = x.index_select(d, index) if size[d] else x.new_zeros(*size[:d], more, *size[d + 1 :])
        return x, False, f"of size {more} in dimension {d}"
    if how == 7 and x.dim():
        return (x[None] if random.random() < 0.5 else x.flatten()), False, "of another rank"
    if how == 8 and x.dim() > 1:
        a, b = random.sample(range(x.dim()), 2)
        return x.transpose(a, b), False, f"with dimensions {a} and {b} exchanged"
    if how == 9 and x.dim():
        d = random.randrange(x.dim())
        return x.narrow(d, 0, min(x.shape[d], 1)).expand(x.shape), False, f"repeated along {d}"
    if how == 10 and x.dim():
        wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1] + 1, dtype=x.dtype)
        wide[..., ::2][..., : x.shape[-1]] = x
        return wide[..., ::2][..., : x.shape[-1]], False, "with gaps"
    if how == 11:
        short = x.contiguous().clone()
        short.untyped_storage().resize_(random.choice([0, short.untyped_storage().nbytes() // 2]))
        return short, short.numel() > 0, "with less memory than it has numbers"
    if how == 12:
        return random.choice(tensors), False, "another of its tensors"
    if how == 13:
        if random.random() < 0.5:  # memory from another allocator cannot be shared lazily
            return torch._lazy_clone(x.clone()), False, "sharing memory until it is written"
        if random.random() < 0.5:
            return None, True, "None"
        return x.to("meta"), True, "on meta"
    if x.element_size() > 1 and x.numel():
        room = bytearray([0, *bytes_of(x).tolist()])
        odd = torch.frombuffer(room, dtype=x.dtype, offset=1, count=x.numel())
        return odd.view(x.shape), False, "at an odd address"
    return x.clone(), False, "cloned"
