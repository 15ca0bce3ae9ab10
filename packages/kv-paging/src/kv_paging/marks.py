"""Marks of where rows of the first tier end, so that tokens appended later can be taken back."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from kv_paging.residual import ResidualTier
from kv_paging.store import TokenStore
from kv_paging.tokens import BOTH, Stored


@dataclass(frozen=True, slots=True)
class Mark:
    """The end of table rows of a tier, which only grow until `take_back`.

    Attributes:
        member: the tier.
        table_rows: the table rows.
        length: their lengths; of a block-encoded format those of the full blocks.
        residual: the residual tokens of a block-encoded format, which may fill a block meanwhile.
    """

    member: TokenStore | ResidualTier
    table_rows: Int[Tensor, " S"]
    length: Int[Tensor, " S"]
    residual: Stored | None = None

    @classmethod
    def of(cls, member: TokenStore | ResidualTier, table_rows: Int[Tensor, " S"]) -> "Mark":
        """Mark where table rows end."""
        if isinstance(member, TokenStore):
            return cls(member, table_rows, member.lengths_of(table_rows))
        residual = member.waiting.read(table_rows, BOTH)
        return cls(member, table_rows, member.blocks.lengths_of(table_rows), residual)

    def take_back(self) -> None:
        """Remove what was appended since; the bytes of the other tokens are as they were.

        Raises:
            PoolExhausted: a residual was encoded meanwhile, and the pool has too few pages for it.
        """
        if isinstance(self.member, TokenStore):
            self.member.take_back(self.table_rows, self.length)
            return
        blocks, waiting, old = self.member.blocks, self.member.waiting, self.residual
        assert old is not None, "it is read with the mark"
        assert old.key is not None, "both were requested"
        assert old.value is not None, "both were requested"
        drained = blocks.lengths_of(self.table_rows) > self.length
        blocks.take_back(self.table_rows, self.length)
        waiting.take_back(self.table_rows, old.held.sum(1).masked_fill(drained, 0))
        again = old.held & drained[:, None]
        waiting.append(self.table_rows, old.key, old.value, again, old.score, old.position)
