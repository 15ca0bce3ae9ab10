"""Tokens that are encoded together: they come and go one by one, their bytes block by block."""

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

    Every length is a whole number of blocks. A token that goes leaves a hole: its position becomes
    -1 and its score inf, and its bytes stay until its block has no token left. Then the table row's
    last block moves there, bytes as they are.
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
        """Start with empty table rows; see Table rows."""
        super().__init__(pool, layout, layers, sequences, heads, facing=facing)
        self._holes = torch.zeros_like(self._length)

    @property
    def live(self) -> Int[Tensor, "N B H"]:
        """Tokens in each table row, holes not counted."""
        return self._length.long() - self._holes.long()

    @property
    def table_bytes(self) -> int:
        """Memory of page tables, lengths and numbers of holes."""
        return super().table_bytes + self._holes.numel() * self._holes.itemsize

    def compact(self, table_rows: Int[Tensor, " S"], keep: Bool[Tensor, "S L"]) -> int:
        """Let go of the tokens not marked by `keep`; whole pages go back to the pool.

        Returns:
            Pages that went back.

        Raises:
            ValueError: `keep` says nothing about some slots, or pages hold no positions.
        """
        expect_shape("keep", keep, table_rows.shape[0], None)
        self._expect_positions()
        table_rows, length, wrong = self._named(table_rows)
        (longest,) = self._agree(wrong, length.amax() if len(length) else wrong)
        expect_cover("keep", keep.shape[1], longest)
        stay = present(self.whole(), table_rows, longest)
        gone = stay & ~keep[:, :longest]
        stay = stay & keep[:, :longest]
        self._make_holes(table_rows, gone)
        block = self.layout.format.block
        # `longest` is a whole number of blocks.
        full = stay.view(len(stay), longest // block, block).any(-1)
        freed = self._compact(table_rows, length, wrong, full, block)
        left = full.sum(1) * block - stay.sum(1)
        self._holes.view(-1)[table_rows] = left.to(self._holes.dtype)
        return freed

    def remove(self, table_rows: Int[Tensor, " S"], slot: Int[Tensor, " S"]) -> None:
        """Let go of one token of each table row; slot -1 leaves a table row alone.

        Raises:
            ValueError: a slot past the table row's end, or pages hold no positions.
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
        """Refuse: a token cannot be written into a block that is encoded.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{self.layout.format.block} tokens are encoded together here, so none of them can be "
            "overwritten; remove it, and append the other through Tiers"
        )

    def truncate(self, length: Int[Tensor, " B"]) -> None:
        """Let each head of sequence b keep its first length[b] slots at most.

        Raises:
            ValueError: a negative length, not one for each sequence, or one that cuts a block.
        """
        self.expect_lengths(length)
        self.expect_whole(length[:, None])
        super().truncate(length)
        # What is cut off may have had holes.
        left, slots = self._length.flatten().long(), self.longest
        holes = before(left, slots) & ~present(self.whole(), self.table_rows(), slots)
        self._holes.copy_(holes.sum(1).view_as(self._holes))

    def expect_whole(self, length: Int[Tensor, "B _"]) -> None:
        """Refuse to cut a block.

        Raises:
            ValueError: a length, shorter than a table row, that is not a whole number of blocks.
        """
        block = self.layout.format.block
        cut = (length % block != 0) & (length < self._length)
        if cut.any():
            layer, sequence, head = cut.nonzero()[0].tolist()
            asked = int(length.expand_as(self._length[layer])[sequence, head])
            raise ValueError(
                f"{block} tokens are encoded together, and {asked} tokens of a table row of "
                f"{int(self._length[layer, sequence, head])} would end inside such a block; keep a "
                "multiple of that, or a format in which every token stands alone"
            )

    def _make_holes(self, table_rows: Tensor, gone: Bool[Tensor, "S L"]) -> None:
        where = gone.nonzero()
        page, row = self._place(table_rows[where[:, 0]], where[:, 1])
        scores, positions = score_segment(self.layout), position_segment(self.layout)
        if scores is not None:
            inf = torch.full((len(page), 1), torch.inf, device=page.device)
            put(self.pool.data, scores, page, row, inf.view(torch.uint8))
        assert positions is not None  # they were asked for
        none = torch.full((len(page), 1), -1, dtype=torch.int32, device=page.device)
        put(self.pool.data, positions, page, row, none.view(torch.uint8))

    def _expect_positions(self) -> None:
        if not self.layout.positions:
            raise ValueError(
                "pages of this layout hold no positions, and where tokens are encoded together a "
                "place without a token is known by its position; lay them out with positions=True"
            )

    def _reorder(self, rows: Tensor, source: Tensor) -> None:
        super()._reorder(rows, source)
        self._holes = self._holes[:, source].contiguous()

    def _join(self, other: HeadPages) -> None:
        assert isinstance(other, BlockStore)  # stores of other kinds were refused
        self._holes = torch.cat((self._holes, other._holes), 1)
        super()._join(other)

    def _empty(self) -> None:
        super()._empty()
        self._holes = self._holes[:, :0].contiguous()

    def clear(self, sequences: Int[Tensor, " n"]) -> None:
        """Let finished sequences give all their pages back; they go on as empty ones.

        Raises:
            ValueError: a sequence that does not exist, or is named twice.
        """
        super().clear(sequences)
        self._holes[:, sequences] = 0
