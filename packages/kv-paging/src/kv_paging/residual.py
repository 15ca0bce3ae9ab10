"""A tier with a block-encoded format: full blocks, and the residual tokens."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_paging import torch_kernels
from kv_paging.blocks import BlockStore
from kv_paging.checks import expect_shape
from kv_paging.store import TokenStore, held_of
from kv_paging.table import pages_for
from kv_paging.tokens import BOTH, Stored
from kv_paging.work import Recoding
from kv_policy import PagedTokens


class ResidualTier:
    """Full blocks in the tier's format, and a residual of less than a block in the raw one.

    A row's residual tokens are stored raw until they fill a block; then they are encoded together,
    once. A place, as returned by `weakest_all` and accepted by `fetch`, `remove` and `replace`, is
    twice the slot in the blocks, or twice the slot in the residual plus one.

    Everything but `weakest_all` synchronizes with the device.
    """

    def __init__(self, blocks: BlockStore, waiting: TokenStore) -> None:
        """Combine two stores over the same table rows."""
        self.blocks, self.waiting = blocks, waiting
        self.pool = blocks.pool

    def append(
        self,
        table_rows: Int[Tensor, " S"],
        key: Float[Tensor, "S L D"],
        value: Float[Tensor, "S L Dv"],
        keep: Bool[Tensor, "S L"],
        score: Float[Tensor, "S L"] | None = None,
        position: Int[Tensor, "S L"] | None = None,
    ) -> None:
        """Append tokens to the residual, and encode full blocks.

        Raises:
            PoolExhausted: the pool has too few pages and may not grow; nothing has changed.
            ValueError: shapes do not match, or scores or positions are missing or not stored here.
        """
        block = self.blocks.layout.format.block
        if self.waiting.longest + keep.shape[1] < block:  # known without synchronizing
            self.waiting.append(table_rows, key, value, keep, score, position)
            return
        expect_shape("keep", keep, table_rows.shape[0], None)
        self.blocks.expect_tokens(key, value, score, position, *keep.shape)
        old = self.waiting.read(table_rows, BOTH)  # raises for invalid table rows
        count = old.held.sum(1) + keep.sum(1)
        filled = count // block * block
        every = torch.cat((old.held, keep), 1)
        goes = every & (every.cumsum(1) <= filled[:, None])
        drains = (filled > 0)[:, None]
        self._reserve(table_rows, filled, count - filled)
        tokens = _after(old, key, value, score, position)
        self.blocks.append(table_rows, tokens[0], tokens[1], goes, tokens[2], tokens[3])
        self.waiting.compact(table_rows, old.held & ~drains)
        # A table row without a full block keeps its old residual.
        rest = every & ~goes
        rest[:, : old.held.shape[1]] &= drains
        self.waiting.append(table_rows, tokens[0], tokens[1], rest, tokens[2], tokens[3])

    def append_stored(
        self, table_rows: Int[Tensor, " S"], source: PagedTokens, keep: Bool[Tensor, "S L"]
    ) -> None:
        """Decode stored tokens and append them, as TokenStore.

        Raises:
            PoolExhausted: the pool has too few pages and may not grow; nothing has changed.
            ValueError: shapes do not match, or the source has other dimensions, or lacks scores or
                positions.
        """
        self.waiting.expect_source(source, len(table_rows))
        rows = torch.arange(len(table_rows), device=table_rows.device)
        tokens = Recoding(source, rows, table_rows, rows, held_of(source, keep))
        new = torch_kernels.decoded(tokens, self.waiting.layout, torch_kernels.read)
        self.append(table_rows, new.key, new.value, new.keep, new.score, new.position)

    def weakest_all(
        self, until: Int[Tensor, " S"] | None = None
    ) -> tuple[Float[Tensor, " S"], Int[Tensor, " S"]]:
        """Return the lowest score of each table row and its place, as TokenStore."""
        score, slot = self.blocks.weakest_all(until)
        other, loose = self.waiting.weakest_all(until)
        first = (slot >= 0) & ((score <= other) | (loose < 0))
        place = (2 * slot).where(first, 2 * loose + 1)
        return score.where(first, other), place.clamp(min=-1)

    def fetch(self, table_rows: Int[Tensor, " S"], place: Int[Tensor, " S"]) -> Stored:
        """Read one token of each table row, as TokenStore."""
        slot, loose = _split(place)
        first, second = self.blocks.fetch(table_rows, slot), self.waiting.fetch(table_rows, loose)
        assert first.key is not None  # fetch decodes both
        assert first.value is not None
        assert second.key is not None
        assert second.value is not None
        mine = first.held
        return Stored(
            mine | second.held,
            _either(mine, first.score, second.score),
            _either(mine, first.position, second.position),
            _either(mine[..., None], first.key, second.key),
            _either(mine[..., None], first.value, second.value),
        )

    def remove(self, table_rows: Int[Tensor, " S"], place: Int[Tensor, " S"]) -> None:
        """Evict one token of each table row; place -1 leaves a table row unchanged."""
        slot, loose = _split(place)
        self.waiting.remove(table_rows, loose)
        if bool((slot >= 0).any()):
            self.blocks.remove(table_rows, slot)

    def truncate(self, length: Int[Tensor, " B"]) -> None:
        """Truncate each head of sequence b to at most its first length[b] tokens.

        These are the oldest if tokens have only been appended: blocks precede the residual.

        Raises:
            ValueError: a negative length, not one length per sequence, or one inside a block.
        """
        self.expect_cut(length)
        held = self.blocks.length.long()
        self.waiting.cut((length[:, None] - held).clamp(min=0))
        self.blocks.truncate(length)

    def expect_cut(self, length: Int[Tensor, " B"]) -> None:
        """Raise if `truncate` would.

        Raises:
            ValueError: a negative length, not one length per sequence, or one inside a block.
        """
        self.blocks.expect_lengths(length)
        self.blocks.expect_whole(length[:, None])

    def pages_for_more(self, count: Int[Tensor, " S"]) -> Int[Tensor, ""]:
        """Return a bound of the pages for `count` more tokens, at most a block per table row."""
        tokens, block = self.blocks.layout.tokens, self.blocks.layout.format.block
        loose, length = (s.length.flatten().long() for s in (self.waiting, self.blocks))
        fills = (loose + count >= block) & (length % tokens == 0)
        return self.waiting.pages_for_more(count) + fills.sum()

    def _reserve(self, table_rows: Tensor, filled: Tensor, rest: Tensor) -> None:
        """Reserve all pages before anything changes, if the pool may have too few."""
        blocks, waiting = self.blocks, self.waiting
        if blocks.pool.grows:
            return
        full, loose = (s.length.flatten()[table_rows].long() for s in (blocks, waiting))
        more = pages_for(full + filled, blocks.layout.tokens) - pages_for(
            full, blocks.layout.tokens
        )
        now, then = (pages_for(x, waiting.layout.tokens) for x in (loose, rest))
        grows = (then - now).where(filled == 0, 0).sum()
        drained = (then - now).where(filled > 0, 0).sum()
        first, last = torch.stack((more.sum(), more.sum() + grows + drained)).tolist()
        blocks.pool.reserve(max(first, last))


def _split(place: Tensor) -> tuple[Tensor, Tensor]:
    loose = place % 2 == 1  # -1, no place, is odd as well, and its half is -1
    half = place.div(2, rounding_mode="floor")
    return half.where(~loose, -1), half.where(loose, -1)


def _after(
    old: Stored,
    key: Tensor,
    value: Tensor,
    score: Tensor | None,
    position: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Append new tokens to the residual."""
    assert old.key is not None  # vectors were requested
    assert old.value is not None
    return (
        _join(old.key, key),
        _join(old.value, value),
        None if old.score is None or score is None else torch.cat((old.score, score), 1),
        None
        if old.position is None or position is None
        else torch.cat((old.position, position), 1),
    )


def _join(old: Tensor, new: Tensor) -> Tensor:
    dtype = torch.promote_types(old.dtype, new.dtype)
    return torch.cat((old.to(dtype), new.to(dtype)), 1)


def _either(mask: Tensor, yes: Tensor | None, no: Tensor | None) -> Tensor | None:
    if yes is None or no is None:
        return None
    dtype = torch.promote_types(yes.dtype, no.dtype)
    return yes.to(dtype).where(mask, no.to(dtype))
