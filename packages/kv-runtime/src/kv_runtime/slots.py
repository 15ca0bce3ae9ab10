"""Attention over pages in an engine's blocks, with one token per slot."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import lcm
from typing import Final, TypeAlias

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from kv_attention import (
    DecodeRows,
    DenseTokens,
    RowInputs,
    RowMaps,
    RowMemo,
    TokenPlaces,
    attend,
    load_rows,
)
from kv_paging import PageKernels, page_kernels_of, select_page_kernels
from kv_policy import HeadBasis, LayerBasis, PagedTokens, PageLayout, TileCounts, TokenFormat
from kv_runtime.bases import row_maps
from kv_runtime.checks import check_shift
from kv_runtime.copies import to_device
from kv_runtime.output_rows import decode_rows, write_rows

LOSS: Final = 1 / 40  # of a block's bytes, at most, if a number of tokens allows it
ALIGNED: Final = 16  # bytes, where a page with unused bytes ends
# Source, place and target of a `SlotBatch`.
_Where: TypeAlias = tuple[slice | Tensor, Tensor | None, slice | Tensor]


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """Requests with about equally many new tokens, as a padded batch."""

    position: Int[Tensor, "B L"]  # position in the sequence; -1 where padded
    table: Int[Tensor, "B H T"]
    stored: Int[Tensor, "B H"]  # tokens of earlier steps, on the pages
    longest: int  # upper bound of `stored`
    source: slice | Int[Tensor, " BL"]  # row of each element among new tokens; any for padding
    place: Int[Tensor, " n"] | None  # flat index of each token; None: there is no padding
    target: slice | Int[Tensor, " n"]  # row of each token
    tiles: TileCounts = field(init=False)  # of `stored`, which is the same in all layers

    def __post_init__(self) -> None:
        """Start to count tiles."""
        object.__setattr__(self, "tiles", TileCounts(self.stored.int().reshape(1, -1)))

    def take(self, x: Float[Tensor, "m heads D"]) -> Float[Tensor, "B L heads D"]:
        """Return the tokens' vectors: a view if their rows follow each other."""
        return x[self.source].view(*self.position.shape, *x.shape[1:])

    def tokens(self, pages: UInt8[Tensor, "P nbytes"], layout: PageLayout) -> PagedTokens:
        """Return the tokens of earlier steps in a layer's pages."""
        return PagedTokens(
            pages, self.table, self.stored, layout, longest=self.longest, tiles=self.tiles
        )


@dataclass(frozen=True, slots=True)
class Blocks:
    """Pages inside the blocks of one layer.

    A block holds one page per KV head, consecutively: head h of block b has page b * H + h. The
    last bytes of a page may be unused, where the engine gives blocks of several layers equal sizes.
    """

    heads: int  # H
    layout: PageLayout  # of a page, which holds as many tokens as a block
    kernels: PageKernels
    decode: DecodeRows | None = None  # decodes a layer in one call; None: the backend does not

    @classmethod
    def of(
        cls,
        format: TokenFormat,
        heads: int,
        tokens: int,
        nbytes: int,
        device: torch.device,
        backend: str,
    ) -> "Blocks":
        """Lay out the pages of blocks of `nbytes` bytes, and choose the page kernels."""
        layout = PageLayout(format, tokens, nbytes // heads)
        kernels = select_page_kernels(layout, device, page_kernels_of(backend))
        return cls(heads, layout, kernels, load_rows(backend))

    def pages(self, block: Int[Tensor, "*any"]) -> Int[Tensor, "*any H"]:
        """Return the pages of blocks."""
        return block[..., None] * self.heads + torch.arange(self.heads, device=block.device)

    def data(self, cache: UInt8[Tensor, "blocks *rest bytes"]) -> UInt8[Tensor, "P nbytes"]:
        """Return the bytes of a layer's blocks by page."""
        nbytes = self.layout.nbytes
        return cache.as_strided((cache.shape[0] * self.heads, nbytes), (nbytes, 1))

    def places(self, slot: Int[Tensor, " n"]) -> tuple[Int[Tensor, " nH"], Int[Tensor, " nH"]]:
        """Return the page of each token and head, and its slot there; `slot` as in `step`."""
        # Padding is written to block 0, which vLLM never allocates.
        place, tokens = slot.clamp(min=0), self.layout.tokens
        page = self.pages(place.div(tokens, rounding_mode="floor"))
        rows = (place % tokens)[:, None].expand_as(page)
        return page.flatten(), rows.flatten().contiguous()  # read so by every layer

    def keys(
        self, cache: UInt8[Tensor, "blocks *rest bytes"], block: Int[Tensor, " n"]
    ) -> Float[Tensor, "n H tokens D"]:
        """Decode the keys in blocks; slots that no token has been stored in give any numbers."""
        table = self.pages(block)[..., None]
        count, tokens = table.shape[:2], self.layout.tokens
        length = table.new_full(count, tokens)
        stored = PagedTokens(self.data(cache), table, length, self.layout, longest=tokens)
        row = torch.arange(length.numel(), device=table.device)
        key = self.kernels.read(stored, row, tokens, frozenset({"keys"})).key
        assert key is not None, "the kernels read what is requested"
        found: Tensor = key.unflatten(0, count)
        return found

    def step(
        self,
        start: Int[Tensor, " B1"],
        length: Int[Tensor, " B"],
        longest: int,
        table: Int[Tensor, "B W"],
        slot: Int[Tensor, " n"],
    ) -> "SlotStep":
        """Compute the metadata of a step.

        Args:
            start: on the CPU, the index of each request's first new token among all new ones, then
                their number.
            length: tokens of each request, including new ones.
            longest: upper bound of `length`.
            table: block table of each request, in order.
            slot: slot of each new token: block * tokens + offset in the block, or -1 for padding.
        """
        columns = -(-longest // self.layout.tokens)
        batches = self._batches(start, length, longest, table[:, :columns])
        return SlotStep(self, *self.places(slot), tuple(batches))

    def _batches(
        self,
        start: Int[Tensor, " B1"],
        length: Int[Tensor, " B"],
        longest: int,
        table: Int[Tensor, "B T"],
    ) -> Iterator[SlotBatch]:
        device = length.device
        count = start.diff()
        if bool((count == 1).all()):  # as in most steps
            yield self._consecutive(slice(0, len(count)), 1, length, longest, table)
            return
        # Group by powers of two, so that less than half of a batch is padding.
        rank = torch.frexp((count - 1).double()).exponent.where(count > 0, -1)
        for each in sorted(set(rank.tolist()) - {-1}):
            request = (rank == each).nonzero()[:, 0]
            new, first = count[request], int(request[0])
            width = int(new.max())
            follow = torch.equal(request, torch.arange(first, first + len(request)))
            full = int(new.min()) == width
            chosen: slice | Tensor = slice(first, first + len(request))
            if follow and full:
                begin = int(start[first])
                rows = slice(begin, begin + len(request) * width)
                yield self._consecutive(rows, width, length[chosen], longest, table[chosen])
                continue
            if not follow:
                chosen = to_device(request, device)
            held = length[chosen, None].long()
            where, position, before = self._padded(start[request], new, held, full=full)
            yield self._batch(position, before, longest, table[chosen], where)

    def _consecutive(
        self,
        rows: slice,
        width: int,
        length: Int[Tensor, " B"],
        longest: int,
        table: Int[Tensor, "B T"],
    ) -> SlotBatch:
        """Return requests with `width` new tokens each, in consecutive rows."""
        before = length[:, None].long() - width
        position = before if width == 1 else before + torch.arange(width, device=before.device)
        return self._batch(position, before, longest, table, (rows, None, rows))

    def _batch(
        self,
        position: Int[Tensor, "B L"],
        before: Int[Tensor, "B 1"],
        longest: int,
        table: Int[Tensor, "B T"],
        where: _Where,
    ) -> SlotBatch:
        pages = self.pages(table).mT.int().contiguous()
        stored = before.int().expand(-1, self.heads).contiguous()
        return SlotBatch(position, pages, stored, longest, *where)

    @staticmethod
    def _padded(
        start: Int[Tensor, " B"], new: Int[Tensor, " B"], held: Int[Tensor, "B 1"], *, full: bool
    ) -> tuple[_Where, Tensor, Tensor]:
        """Return where requests have their tokens, with positions and earlier tokens (`SlotBatch`).

        What the device needs is moved there at once, without waiting for it.
        """
        offset = torch.arange(int(new.max()))
        there = offset < new[:, None]
        row = (start[:, None] + offset).where(there, 0)
        index = there.flatten().nonzero()[:, 0]
        given = torch.cat((row.flatten(), new, index, row.flatten()[index]))
        moved = to_device(given, held.device).split([row.numel(), len(new), 2 * len(index)])
        before = held - moved[1][:, None]
        column = torch.arange(len(offset), device=held.device)
        position = (before + column).where(column < moved[1][:, None], -1)
        place, target = moved[2].view(2, -1)
        return (moved[0], None if full else place, target), position, before


def fit_block(tokens: int, token_bytes: int, nbytes: int, heads: int) -> tuple[int, int]:
    """Choose the size of a layer's blocks beside layers with blocks of another size.

    An engine gives the blocks of all layers equal bytes, and shares prefixes in common multiples of
    their tokens. So this takes the smallest common multiple for which neither block has more than
    `LOSS` of its bytes unused, or the smallest loss if there is none.

    Args:
        tokens: tokens of a block of the other layers.
        token_bytes: bytes of a token in this layer, over all KV heads.
        nbytes: bytes of a block of the other layers.
        heads: KV heads of this layer; a block has equal pages for them.

    Returns:
        Tokens of a block of this layer, and bytes of all blocks; at least `nbytes`.
    """
    found = []
    for count in range(1, 2 * (nbytes // token_bytes) + 2):
        own = count * token_bytes
        size = max(nbytes, own)
        if size == own or size % (heads * ALIGNED) == 0:
            loss = size / min(nbytes, own) - 1
            found.append((max(0.0, loss - LOSS), lcm(count, tokens), loss, count, size))
    *_, count, size = min(found)
    return count, size


@dataclass(frozen=True, slots=True)
class SlotStep:
    """Metadata of one step, shared by all layers with equal blocks."""

    blocks: Blocks
    page: Int[Tensor, " nH"]  # page of each new token and head, by token
    slot: Int[Tensor, " nH"]
    batches: tuple[SlotBatch, ...]
    decoding: SlotBatch | None = field(init=False)  # in consecutive rows; None: others as well
    memo: RowMemo = field(default_factory=RowMemo, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Find whether the step decodes alone."""
        batch = self.batches[0] if len(self.batches) == 1 else None
        alone = batch is not None and batch.position.shape[1] == 1
        rows = alone and batch is not None and isinstance(batch.source, slice)
        object.__setattr__(self, "decoding", batch if rows else None)


@dataclass(frozen=True, slots=True)
class SlotLayer:
    """Stores tokens in one format, and attends over them and the new tokens.

    New tokens attend to the stored, quantized tokens of earlier steps, and to tokens of their own
    step uncompressed. So a prompt prefilled in one step attends only to uncompressed tokens;
    decoded tokens, and prompts after a cached prefix, attend to compressed ones. The papers of the
    formats measure them this way, and a compressed cache in transformers does the same.

    With a basis, which keeps the shape of vectors, queries and new tokens are projected on arrival
    and the output is projected back, so all tokens that a query sees are coordinates.
    """

    format: TokenFormat
    scale: float
    backend: str
    softcap: float | None = None  # the bound of the layer's logits
    sinks: Float[Tensor, "H G"] | None = field(default=None, compare=False)  # its sinks
    basis: LayerBasis = field(default_factory=LayerBasis, compare=False)
    maps: RowMaps | None = field(init=False, compare=False, repr=False)  # of the basis

    def __post_init__(self) -> None:
        """Check that attention is invariant to a shift of the basis, and find its maps.

        Raises:
            ValueError: keys are shifted, and logits have a bound or sinks.
        """
        check_shift("the policy", self.basis.key, self.softcap, self.sinks)
        singly = self.basis.together == 1
        object.__setattr__(self, "maps", row_maps(self.basis) if singly else None)

    def forward(
        self,
        query: Float[Tensor, "m Q D"],
        key: Float[Tensor, "m H D"],
        value: Float[Tensor, "m H Dv"],
        cache: UInt8[Tensor, "blocks H tokens nbytes"],
        step: SlotStep,
        output: Float[Tensor, "m Q Dv"],
        *,
        stored: bool = False,
        more: bool = False,
    ) -> None:
        """Store the new tokens of a step in `cache` and write their attention to `output`.

        Args:
            query: queries of all tokens.
            key: keys of all tokens.
            value: values of all tokens.
            cache: the blocks.
            step: where the tokens are stored, and what they attend to.
            output: set to their attention.
            stored: another layer of the model has stored these keys and values in this step.
            more: a further layer will attend to them; makes no difference here.
        """
        layout, pages = step.blocks.layout, step.blocks.data(cache)
        if not stored and self._decoded(query, key, value, pages, step, output):
            return
        key, value = _projected(self.basis.key, key), _projected(self.basis.value, value)
        if not stored:
            self._store(pages, key, value, step)
        for batch in step.batches:
            tokens = batch.tokens(pages, layout)
            fresh = DenseTokens(
                batch.take(key).transpose(1, 2),
                batch.take(value).transpose(1, 2),
                batch.position,
                full=batch.place is None,
            )
            q = batch.take(query).unflatten(2, (key.shape[1], -1)).permute(0, 2, 3, 1, 4)
            out = None
            if self.basis.value is None:
                out = decode_rows(output, batch.target, q.shape[3], key.shape[1])
            if self.basis.key is not None:
                q = self.basis.key.project_queries(q)
            found = attend(
                q,
                batch.position,
                (tokens,),
                (fresh,),
                self.scale,
                backend=self.backend,
                softcap=self.softcap,
                sinks=self.sinks,
                out=out,
            ).out
            if self.basis.value is not None:
                found = self.basis.value.undo(found)
            if found is not out:
                write_rows(found, output, batch.target, batch.place)

    def _decoded(
        self,
        query: Float[Tensor, "m Q D"],
        key: Float[Tensor, "m H D"],
        value: Float[Tensor, "m H Dv"],
        pages: UInt8[Tensor, "P nbytes"],
        step: SlotStep,
        output: Float[Tensor, "m Q Dv"],
    ) -> bool:
        """Do what `forward` does in one call; False: the step or the backend needs more of them."""
        batch, blocks = step.decoding, step.blocks
        if batch is None or blocks.decode is None or self.basis.together > 1:
            return False
        assert isinstance(batch.source, slice), "a decoding batch has consecutive rows"
        layout = blocks.layout
        inputs = RowInputs(
            query,
            key,
            value,
            output,
            batch.source.start,
            batch.position,
            (batch.tokens(pages, layout),),
            self.scale,
            self.softcap,
            self.sinks,
            TokenPlaces(pages, layout, step.page, step.slot),
            maps=self.maps,
            memo=step.memo,
        )
        return blocks.decode(inputs) is not None

    def _store(
        self,
        pages: UInt8[Tensor, "P nbytes"],
        key: Float[Tensor, "m H D"],
        value: Float[Tensor, "m H Dv"],
        step: SlotStep,
    ) -> None:
        """Encode new tokens and write them to their pages."""
        step.blocks.kernels.place(pages, step.blocks.layout, step.page, step.slot, key, value)


def _projected(basis: HeadBasis | None, x: Float[Tensor, "m H D"]) -> Float[Tensor, "m H D"]:
    return x if basis is None else basis.project(x.transpose(0, 1)[None])[0].transpose(0, 1)
