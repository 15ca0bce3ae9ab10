"""Tiers of heads whose vectors differ in rank, in equal pages of one pool."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_paging.checks import expect_shape
from kv_paging.head_pages import HeadPages, expect_some
from kv_paging.kernels import shared
from kv_paging.marks import Mark
from kv_paging.page_reservation import PageReservation
from kv_paging.pool import PagePool
from kv_paging.ragged_store import PerHeadRankStore
from kv_paging.rank_groups import RankGroups
from kv_paging.sequences import Sequences
from kv_paging.step import pages_needed
from kv_paging.store import TokenStore
from kv_paging.tiers import Tiers
from kv_paging.turns import reserve_step, step_in_turn
from kv_paging.work import CopiedRows, DecodeStep, NewTokens, Placement
from kv_policy import PageLayout, TokenFormat


class PerHeadRankTiers(Sequences):
    """The tokens of K tiers with heads of several kinds, each with its rank of keys and values.

    The interface is that of `Tiers`, with the same rows. Vectors are zero-padded to the maximum
    rank on input and output; pages store only the rank of the kind. Heads of all kinds share the
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
        """Create empty tiers; they hold no page.

        Args:
            pool: the pool of the pages.
            layouts: per kind, the page layout of each tier.
            kind: per layer and head, an index into `layouts`; all are used.
            sequences: B.
            raw: per kind, the format of tokens until a block is full, if a format needs it.

        Raises:
            ValueError: kinds with different numbers of tiers, or as `Tiers`.
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
        """The stores of all kinds, each with vectors of one rank."""
        return tuple(store for tiers in self.each for store in tiers.parts)

    @property
    def settled(self) -> tuple[TokenStore, ...]:
        """The stores whose full pages do not change when tokens are appended."""
        return tuple(store for tiers in self.each for store in tiers.settled)

    @property
    def in_blocks(self) -> bool:
        """Whether some tier encodes several tokens together; then steps synchronize."""
        return self.each[0].in_blocks

    @property
    def pages_used(self) -> int:
        """Pages held by the tiers; synchronizes with the device."""
        return sum(tiers.pages_used for tiers in self.each)

    @property
    def pages_held(self) -> int:
        """Pages of each table row, added up, as `Tiers`."""
        return sum(tiers.pages_held for tiers in self.each)

    @property
    def table_bytes(self) -> int:
        """Bytes of page tables and lengths."""
        return sum(tiers.table_bytes for tiers in self.each)

    def table_rows(self, layers: slice = slice(None)) -> Int[Tensor, " S"]:
        """Return the ids of the table rows of some layers: ((layer * B) + sequence) * H + head."""
        return self.kinds.table_rows(layers)

    def counts(self) -> Int[Tensor, "K N B H"]:
        """Return the number of tokens in each tier, without synchronizing."""
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
        """Encode the tokens marked by `keep` and append them, in order, to their table rows.

        Raises:
            PoolExhausted: the pool has too few pages and may not grow; nothing has changed.
            ValueError: shapes do not match, or scores or positions are missing or not stored here.
        """
        expect_some(self.parts)
        forms = [tiers.parts[0].layout.format for tiers in self.each]
        expect_shape("key", key, *keep.shape, max(form.key.dim for form in forms))
        expect_shape("value", value, *keep.shape, max(form.value.dim for form in forms))
        split = self.kinds.split(table_rows)
        self._reserve(tier, table_rows, keep)
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

    def marked(self, table_rows: Int[Tensor, " S"]) -> tuple[Mark, ...]:
        """Mark where table rows of the first tier end, as `Tiers.marked`, for each kind."""
        split = zip(self.each, self.kinds.split(table_rows), strict=True)
        return tuple(mark for tiers, (_, own) in split if len(own) for mark in tiers.marked(own))

    def append_stored(
        self,
        tier: int,
        table_rows: Int[Tensor, " S"],
        source: CopiedRows,
        keep: Bool[Tensor, "S L"],
    ) -> None:
        """Encode stored tokens in a tier's format and append them, as `Tiers.append_stored`.

        Raises:
            PoolExhausted: the pool has too few pages and may not grow; nothing has changed.
            ValueError: shapes do not match, or the source has other kinds of heads, other
                dimensions, or no scores or positions.
        """
        expect_some(self.parts)
        expect_shape("keep", keep, len(table_rows), None)
        split = self.kinds.split(table_rows)
        if [part is not None for part in source] != [len(own) > 0 for _, own in split]:
            raise ValueError("the source has other kinds of heads than the table rows")
        self._reserve(tier, table_rows, keep)
        for tiers, part, (place, own) in zip(self.each, source, split, strict=True):
            if part is not None:
                tiers.append_stored(tier, own, (part,), keep[place])

    def _reserve(self, tier: int, table_rows: Tensor, keep: Tensor) -> None:
        """Reserve the pages for the marked tokens, if the pool may have too few."""
        if self.pool.grows:
            return
        more = self.kinds.all_table_rows(table_rows, keep.sum(1))
        needed = [t.pages_for_more(tier, m) for t, m in zip(self.each, more, strict=True)]
        self.pool.reserve(int(torch.stack(needed).sum()))

    def select(
        self, source: Int[Tensor, " B2"], also: Sequence[HeadPages] = (), *, share: bool = False
    ) -> None:
        """Replace the sequences by source[0], source[1], ..., as `Tiers.select`.

        Raises:
            PoolExhausted: too few pages for the copies, including those released.
            ValueError: a sequence does not exist, or none is named.
        """
        super().select(source, also, share=share)
        self.kinds.sequences = len(source)

    def join(self, other: Sequences) -> None:
        """Append the sequences of other tiers over the pool, as `Tiers.join`.

        Raises:
            ValueError: another pool, other layouts, or heads of other kinds; nothing has changed.
        """
        self._expect_kinds(other)
        super().join(other)
        if isinstance(other, PerHeadRankTiers):
            self.kinds.sequences += other.kinds.sequences
            other.kinds.sequences = 0

    def adopt(self, sequence: int, other: Sequences) -> None:
        """Let an empty sequence have the pages of the only one of other tiers, as `Tiers.adopt`.

        Raises:
            ValueError: as `join`; nothing has changed.
        """
        self._expect_kinds(other)
        super().adopt(sequence, other)
        if isinstance(other, PerHeadRankTiers):
            other.kinds.sequences = 0

    def _expect_kinds(self, other: Sequences) -> None:
        if isinstance(other, PerHeadRankTiers) and self.kinds.heads_of != other.kinds.heads_of:
            raise ValueError(
                f"heads of the kinds {other.kinds.heads_of} cannot join heads of the kinds "
                f"{self.kinds.heads_of}; both sides need the same"
            )

    def release(self) -> None:
        """Release all sequences, as `Tiers.release`."""
        super().release()
        self.kinds.sequences = 0

    def clear(self, sequences: Int[Tensor, " n"]) -> None:
        """Return all pages of finished sequences to the pool; the sequences remain, empty.

        Raises:
            ValueError: a sequence does not exist or is named twice.
        """
        for tiers in self.each:
            tiers.clear(sequences)

    def truncate(self, length: Int[Tensor, " B"]) -> None:
        """Truncate each head of sequence b to at most its first length[b] tokens in each tier.

        Raises:
            ValueError: a negative length, or not one length per sequence.
        """
        for tiers in self.each:
            tiers.expect_cut(length)
        for tiers in self.each:
            tiers.truncate(length)

    def weakest(
        self, until: Int[Tensor, " S"] | None = None, first: int | None = None
    ) -> tuple[Float[Tensor, "K S"], Int[Tensor, "K S"]]:
        """Return the lowest score of each table row in each tier, and its place, as `Tiers`.

        Raises:
            ValueError: pages store no scores, or no positions although `until` is given.
        """
        rows = [self.kinds.rows(i) for i in range(self.kinds.count)]
        found = [
            tiers.weakest(None if until is None else until[own], first)
            for tiers, own in zip(self.each, rows, strict=True)
        ]
        return (
            self.kinds.by_table_row([score for score, _ in found]),
            self.kinds.by_table_row([place for _, place in found]),
        )

    def _step(self, choice: Placement, place: Int[Tensor, "K S"], token: NewTokens) -> None:
        cut, none = self.kinds.cut, [None] * self.kinds.count
        choices = cut(torch.stack((choice.candidate, choice.victim, choice.target)), 1)
        places, keys, values = cut(place, 1), cut(token.key), cut(token.value)
        scores = none if token.score is None else cut(token.score)
        positions = none if token.position is None else cut(token.position)
        works = []
        for i, tiers in enumerate(self.each):
            form = tiers.parts[0].layout.format
            key, value = keys[i][:, : form.key.dim], values[i][:, : form.value.dim]
            new = NewTokens(key, value, scores[i], positions[i])
            works.append((Placement(*choices[i]), places[i], new))
        for tiers, work in zip(self.each, works, strict=True):
            tiers.expect_step(*work)
        if self.in_blocks:
            reserve_step([(t.members, *work[:2]) for t, work in zip(self.each, works, strict=True)])
            for members, work in zip((t.members for t in self.each), works, strict=True):
                step_in_turn(members, *work)
            return

        def parts() -> list[DecodeStep]:
            return [tiers.work(*work) for tiers, work in zip(self.each, works, strict=True)]

        self._room.for_step(lambda: pages_needed(parts()))
        shared([store.kernels for store in self.parts]).step(self.pool, parts())
