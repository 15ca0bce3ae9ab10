"""Tiers of heads whose vectors differ in length, in equal pages of one pool."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from kv_paging.checks import expect_shape
from kv_paging.head_pages import HeadPages, expect_some
from kv_paging.kernels import shared
from kv_paging.page_reservation import PageReservation
from kv_paging.pool import PagePool
from kv_paging.ragged_store import PerHeadRankStore
from kv_paging.rank_groups import RankGroups
from kv_paging.sequences import Sequences
from kv_paging.step import pages_needed
from kv_paging.store import TokenStore
from kv_paging.tiers import Tiers
from kv_paging.turns import reserve_step, step_in_turn
from kv_paging.work import DecodeStep, NewTokens, Placement
from kv_policy import PageLayout, TokenFormat


class PerHeadRankTiers(Sequences):
    """The tokens of K tiers where a head has a kind: how many numbers its keys and values take.

    It does what `Tiers` does, with the same rows. Vectors come and go padded with zeros to the
    longest of any kind; pages hold what the kind says and no more. Heads of all kinds share the
    pool, so a page holds more tokens of a head with shorter vectors.
    """

    def __init__(
        self,
        pool: PagePool,
        layouts: Sequence[Sequence[PageLayout]],
        kind: Int[Tensor, "N H"],
        sequences: int,
        *,
        raw: Sequence[TokenFormat] | None = None,
    ) -> None:
        """Start with empty tiers; they hold no page.

        Args:
            pool: where pages come from.
            layouts: of each kind, how a page of each tier holds tokens.
            kind: of each layer and head, an index into `layouts`; all are used.
            sequences: B.
            raw: of each kind, how tokens wait until a block is full, where a format needs it.

        Raises:
            ValueError: kinds of different numbers of tiers, or what Tiers refuses.
        """
        self.pool = pool
        self.kinds = RankGroups(kind.to(pool.device), sequences)
        if len({len(tiers) for tiers in layouts}) != 1 or len(layouts) != self.kinds.count:
            raise ValueError(
                f"layouts of {[len(tiers) for tiers in layouts]} tiers are given for "
                f"{self.kinds.count} kinds of heads; give each kind the same number of tiers"
            )
        self.each = tuple(
            Tiers(pool, tiers, cells, sequences, 1, raw=None if raw is None else raw[i])
            for i, (tiers, cells) in enumerate(zip(layouts, self.kinds.cells, strict=True))
        )
        stores = zip(*(tiers.stores for tiers in self.each), strict=True)
        self.stores = tuple(PerHeadRankStore(self.kinds, members) for members in stores)
        self.tier = self.each[0].tier
        self._room = PageReservation([tiers.stores for tiers in self.each])

    @property
    def tiers(self) -> int:
        """K."""
        return self.each[0].tiers

    @property
    def parts(self) -> tuple[TokenStore, ...]:
        """The stores of all kinds, each of table rows with vectors of one length."""
        return tuple(store for tiers in self.each for store in tiers.parts)

    @property
    def in_blocks(self) -> bool:
        """Whether some tier encodes several tokens together; then steps wait for the device."""
        return self.each[0].in_blocks

    @property
    def pages_used(self) -> int:
        """Pages the tiers hold; the host waits for the device."""
        return sum(tiers.pages_used for tiers in self.each)

    @property
    def table_bytes(self) -> int:
        """Memory of page tables and lengths."""
        return sum(tiers.table_bytes for tiers in self.each)

    def table_rows(self, layers: slice = slice(None)) -> Int[Tensor, " S"]:
        """Give the ids of the table rows of some layers: ((layer * B) + sequence) * H + head."""
        return self.kinds.table_rows(layers)

    def counts(self) -> Int[Tensor, "K N B H"]:
        """Count the tokens of each tier, without waiting."""
        return self.kinds.by_cell([tiers.counts()[..., 0] for tiers in self.each])

    def append(
        self,
        tier: int,
        table_rows: Int[Tensor, " S"],
        key: Float[Tensor, "S L D"],
        value: Float[Tensor, "S L Dv"],
        keep: Bool[Tensor, "S L"],
        score: Float[Tensor, "S L"] | None = None,
        position: Int[Tensor, "S L"] | None = None,
    ) -> None:
        """Encode the tokens marked by `keep` and put them, in order, at the ends of their rows.

        Raises:
            PoolExhausted: the pool has too few pages and may not grow; nothing has changed.
            ValueError: shapes that do not fit, scores or positions missing or not stored here.
        """
        expect_some(self.parts)
        forms = [tiers.parts[0].layout.format for tiers in self.each]
        expect_shape("key", key, *keep.shape, max(form.key.dim for form in forms))
        expect_shape("value", value, *keep.shape, max(form.value.dim for form in forms))
        split = self.kinds.split(table_rows)
        if not self.pool.grows:
            more = self.kinds.all_table_rows(table_rows, keep.sum(1))
            needed = [t.pages_for_more(tier, m) for t, m in zip(self.each, more, strict=True)]
            self.pool.reserve(int(torch.stack(needed).sum()))
        for tiers, form, (place, own) in zip(self.each, forms, split, strict=True):
            if len(own):
                tiers.append(
                    tier,
                    own,
                    key[place, :, : form.key.dim],
                    value[place, :, : form.value.dim],
                    keep[place],
                    None if score is None else score[place],
                    None if position is None else position[place],
                )

    def select(self, source: Int[Tensor, " B2"], also: Sequence[HeadPages] = ()) -> None:
        """Let the sequences become source[0], source[1], ... in all stores, or in none.

        Raises:
            PoolExhausted: too few pages for the copies, those given back counted in.
            ValueError: a sequence that does not exist, or none.
        """
        super().select(source, also)
        self.kinds.sequences = len(source)

    def join(self, other: Sequences) -> None:
        """Let the sequences of other tiers over the pool come after these, as `Tiers.join` does.

        Raises:
            ValueError: another pool, other layouts, or heads of other kinds; nothing has changed.
        """
        if isinstance(other, PerHeadRankTiers) and self.kinds.heads_of != other.kinds.heads_of:
            raise ValueError(
                f"heads of the kinds {other.kinds.heads_of} cannot join heads of the kinds "
                f"{self.kinds.heads_of}; both sides need the same"
            )
        super().join(other)
        if isinstance(other, PerHeadRankTiers):
            self.kinds.sequences += other.kinds.sequences
            other.kinds.sequences = 0

    def release(self) -> None:
        """Let all sequences go, as `Tiers.release` does."""
        super().release()
        self.kinds.sequences = 0

    def clear(self, sequences: Int[Tensor, " n"]) -> None:
        """Let finished sequences give all their pages back; they go on as empty ones.

        Raises:
            ValueError: a sequence that does not exist, or is named twice.
        """
        for tiers in self.each:
            tiers.clear(sequences)

    def truncate(self, length: Int[Tensor, " B"]) -> None:
        """Let each head of sequence b keep its first length[b] tokens of each tier at most.

        Raises:
            ValueError: a negative length, or not one for each sequence.
        """
        for tiers in self.each:
            tiers.expect_cut(length)
        for tiers in self.each:
            tiers.truncate(length)

    def weakest(
        self, until: Int[Tensor, " S"] | None = None
    ) -> tuple[Float[Tensor, "K S"], Int[Tensor, "K S"]]:
        """Give the lowest score of each table row in each tier, and where it is, as `Tiers` does.

        Raises:
            ValueError: pages hold no scores, or no positions where these are asked about.
        """
        rows = [self.kinds.rows(i) for i in range(self.kinds.count)]
        found = [
            tiers.weakest(None if until is None else until[own])
            for tiers, own in zip(self.each, rows, strict=True)
        ]
        return (
            self.kinds.by_table_row([score for score, _ in found]),
            self.kinds.by_table_row([place for _, place in found]),
        )

    def step(
        self,
        candidate: UInt8[Tensor, " S"],
        victim: UInt8[Tensor, " S"],
        target: UInt8[Tensor, " S"],
        place: Int[Tensor, "K S"],
        key: Float[Tensor, "S D"],
        value: Float[Tensor, "S Dv"],
        score: Float[Tensor, " S"] | None = None,
        position: Int[Tensor, " S"] | None = None,
    ) -> None:
        """Let one token enter each row, and one leave or move to a later tier, as `Tiers` does.

        Raises:
            PoolExhausted: the pool is fixed and has too few pages; nothing has changed.
            ValueError: shapes that do not fit, scores or positions missing or not stored here.
        """
        works = []
        for i, tiers in enumerate(self.each):
            own, form = self.kinds.rows(i), tiers.parts[0].layout.format
            works.append(
                (
                    Placement(candidate[own], victim[own], target[own]),
                    place[:, own],
                    NewTokens(
                        key[own, : form.key.dim],
                        value[own, : form.value.dim],
                        None if score is None else score[own],
                        None if position is None else position[own],
                    ),
                )
            )
        for tiers, (choice, at, token) in zip(self.each, works, strict=True):
            tiers.expect_step(choice, at, token)
        if self.in_blocks:
            reserve_step([(t.members, *work[:2]) for t, work in zip(self.each, works, strict=True)])
            for members, work in zip((t.members for t in self.each), works, strict=True):
                step_in_turn(members, *work)
            return

        def parts() -> list[DecodeStep]:
            return [tiers.work(*work) for tiers, work in zip(self.each, works, strict=True)]

        self._room.for_step(lambda: pages_needed(parts()))
        shared([store.kernels for store in self.parts]).step(self.pool, parts())
