"""Stores of block-encoded tokens: removed one by one, freed block by block."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_paging.checks import expect_cover, expect_shape
from kv_paging.head_pages import HeadPages
from kv_paging.moves import position_segment, put, score_segment
from kv_paging.pool import PagePool
from kv_paging.store import TokenStore
from kv_paging.torch_kernels import before, present
from kv_policy import PageLayout


class BlockStore(TokenStore):
    """The full blocks of a tier whose format encodes several tokens together.

    Every length is a multiple of the block size. A removed token leaves a hole: its position
    becomes -1 and its score inf, and its bytes remain until its block is empty. Then the table
    row's last block moves there, without being encoded again.
    """

    in_blocks = True

    def __init__(
        self,
        pool: PagePool,
        layout: PageLayout,
        layers: int,
        sequences: int,
        heads: int,
        *,
        facing: HeadPages | None = None,
    ) -> None:
        """Create empty table rows; see HeadPages."""
        super().__init__(pool, layout, layers, sequences, heads, facing=facing)
        self._holes = torch.zeros_like(self._length)

    @property
    def live(self) -> Int[Tensor, "N B H"]:
        """Tokens in each table row, excluding holes."""
        return self._length.long() - self._holes.long()

    @property
    def table_bytes(self) -> int:
        """Bytes of page tables, lengths and hole counts."""
        return super().table_bytes + self._holes.numel() * self._holes.itemsize

    def compact(self, table_rows: Int[Tensor, " S"], keep: Bool[Tensor, "S L"]) -> int:
        """Evict the tokens not marked by `keep`; return whole pages to the pool.

        Returns:
            The number of pages returned to the pool.

        Raises:
            ValueError: `keep` does not cover all slots, or pages store no positions.
        """
        expect_shape("keep", keep, table_rows.shape[0], None)
        self._expect_positions()
        table_rows, length, wrong = self._named(table_rows)
        (longest,) = self._agree(wrong, length.amax() if len(length) else wrong)
        expect_cover("keep", keep.shape[1], longest)
        stay = present(self.whole(), table_rows, longest)
        gone = stay & ~keep[:, :longest]
        self.own(table_rows, gone)
        stay = stay & keep[:, :longest]
        self._make_holes(table_rows, gone)
        block = self.layout.format.block
        # `longest` is a multiple of the block size.
        full = stay.view(len(stay), longest // block, block).any(-1)
        freed = self._compact(table_rows, length, wrong, full, block)
        left = full.sum(1) * block - stay.sum(1)
        self._holes.view(-1)[table_rows] = left.to(self._holes.dtype)
        return freed

    def remove(self, table_rows: Int[Tensor, " S"], slot: Int[Tensor, " S"]) -> None:
        """Evict one token of each table row; slot -1 leaves a table row unchanged.

        Raises:
            ValueError: a slot past the table row's end, or pages store no positions.
        """
        expect_shape("slot", slot, table_rows.shape[0])
        named, length, wrong = self._named(table_rows)
        self._agree_slots(wrong, slot, length)
        slots = torch.arange(self.longest, device=slot.device)
        self.compact(named, slots != slot[:, None])

    def replace(
        self,
        table_rows: Int[Tensor, " S"],
        slot: Int[Tensor, " S"],
        key: Float[Tensor, "S D"],
        value: Float[Tensor, "S Dv"],
        score: Float[Tensor, " S"] | None = None,
        position: Int[Tensor, " S"] | None = None,
    ) -> None:
        """Raise: a token of an encoded block cannot be overwritten.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{self.layout.format.block} tokens are encoded together here, so none of them can be "
            "overwritten; remove the token and append the new one through Tiers"
        )

    def truncate(self, length: Int[Tensor, " B"]) -> None:
        """Truncate each head of sequence b to at most its first length[b] slots.

        Raises:
            ValueError: a negative length, not one length per sequence, or one inside a block.
        """
        self.expect_lengths(length)
        self.expect_whole(length[:, None])
        super().truncate(length)
        self.count_holes()  # the truncated slots may have included some

    def count_holes(self) -> None:
        """Count the holes of all table rows anew."""
        left, slots = self._length.flatten().long(), self.longest
        holes = before(left, slots) & ~present(self.whole(), self.table_rows(), slots)
        self._holes.copy_(holes.sum(1).view_as(self._holes))

    def expect_whole(self, length: Int[Tensor, "B _"]) -> None:
        """Raise if a length would end inside a block.

        Raises:
            ValueError: a length below a table row's that is not a multiple of the block size.
        """
        block = self.layout.format.block
        cut = (length % block != 0) & (length < self._length)
        if cut.any():
            layer, sequence, head = cut.nonzero()[0].tolist()
            asked = int(length.expand_as(self._length[layer])[sequence, head])
            raise ValueError(
                f"{block} tokens are encoded together, and {asked} tokens of a table row of "
                f"{int(self._length[layer, sequence, head])} would end inside such a block; keep a "
                "multiple of that, or use a format that encodes each token separately"
            )

    def _make_holes(self, table_rows: Tensor, gone: Bool[Tensor, "S L"]) -> None:
        where = gone.nonzero()
        page, row = self._place(table_rows[where[:, 0]], where[:, 1])
        scores, positions = score_segment(self.layout), position_segment(self.layout)
        if scores is not None:
            inf = torch.full((len(page), 1), torch.inf, device=page.device)
            put(self.pool.data, scores, page, row, inf.view(torch.uint8))
        assert positions is not None  # positions were requested
        none = torch.full((len(page), 1), -1, dtype=torch.int32, device=page.device)
        put(self.pool.data, positions, page, row, none.view(torch.uint8))

    def _expect_positions(self) -> None:
        if not self.layout.positions:
            raise ValueError(
                "pages of this layout store no positions, which mark empty slots in block-encoded "
                "formats; use a layout with positions=True"
            )

    def _reorder(self, rows: Tensor, source: Tensor) -> None:
        super()._reorder(rows, source)
        self._holes = self._holes[:, source].contiguous()

    def _join(self, other: HeadPages) -> None:
        assert isinstance(other, BlockStore)  # other store types were rejected
        self._holes = torch.cat((self._holes, other._holes), 1)
        super()._join(other)

    def _adopt(self, sequence: int, other: HeadPages) -> None:
        assert isinstance(other, BlockStore), "both have the same layout"
        holes = other._holes[:, 0]
        super()._adopt(sequence, other)
        self._holes[:, sequence] = holes

    def _branch(
        self,
        sequence: int,
        other: HeadPages,
        full: Tensor,
        copied: Tensor,
        joint: int,
        total: int,
    ) -> None:
        assert isinstance(other, BlockStore), "both have the same layout"
        super()._branch(sequence, other, full, copied, joint, total)
        other._holes = self._holes[:, sequence : sequence + 1].clone()

    def _empty(self) -> None:
        super()._empty()
        self._holes = self._holes[:, :0].contiguous()

    def clear(self, sequences: Int[Tensor, " n"]) -> None:
        """Return all pages of finished sequences to the pool; the sequences remain, empty.

        Raises:
            ValueError: a sequence does not exist or is named twice.
        """
        super().clear(sequences)
        self._holes[:, sequences] = 0
