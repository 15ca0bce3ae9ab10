"""All tiers of a cache over one pool, and the decode step that moves tokens between them."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_paging.blocks import BlockStore
from kv_paging.checks import expect_shape
from kv_paging.head_pages import expect_some
from kv_paging.kernels import shared
from kv_paging.layouts import expect_alike, waiting_layout
from kv_paging.marks import Mark
from kv_paging.page_reservation import PageReservation
from kv_paging.pool import PagePool
from kv_paging.residual import ResidualTier
from kv_paging.sequences import Sequences
from kv_paging.step import pages_needed
from kv_paging.store import TokenStore
from kv_paging.turns import step_in_turn
from kv_paging.work import CopiedRows, DecodeStep, NewTokens, Placement
from kv_policy import PagedTokens, PageLayout, TokenFormat


class Tiers(Sequences):
    """The tokens of K tiers of each table row, in pages of one pool.

    Consecutive stores share a page table in pairs, from its left and right (LeanKV section 5.2).
    `append`, `select`, `clear` and `truncate` synchronize with the device. `step` does not, except
    once if the pool's lower bound of free pages is too low (see `PagePool.ensure`), and once every
    64 steps, to read the lengths of table rows.

    A tier with a block-encoded format has two stores: full blocks, followed by the residual tokens,
    raw in pages of the same pool until they fill a block. Steps of such tiers synchronize with the
    device.
    """

    def __init__(
        self,
        pool: PagePool,
        layouts: Sequence[PageLayout],
        layers: int,
        sequences: int,
        heads: int,
        *,
        raw: TokenFormat | None = None,
    ) -> None:
        """Create empty tiers; they hold no page.

        Args:
            pool: the pool of the pages.
            layouts: the page layout of each tier, the best tier first.
            layers: N.
            sequences: B.
            heads: H.
            raw: the format of tokens until a block is full, for block-encoded formats.

        Raises:
            ValueError: no tier, scores or positions stored in some tiers only, vectors of different
                dimensions, a missing `raw`, or as TokenStore.
        """
        expect_alike(layouts)
        self.pool = pool
        stores: list[TokenStore] = []
        members: list[TokenStore | ResidualTier] = []
        shape = (layers, sequences, heads)

        def added(layout: PageLayout, kind: type[TokenStore] = TokenStore) -> TokenStore:
            facing = stores[-1] if len(stores) % 2 else None
            stores.append(kind(pool, layout, *shape, facing=facing))
            return stores[-1]

        for layout in layouts:
            if layout.format.block == 1:
                members.append(added(layout))
                continue
            blocks, waiting = added(layout, BlockStore), added(waiting_layout(layout, raw))
            assert isinstance(blocks, BlockStore)
            members.append(ResidualTier(blocks, waiting))
        self.stores = tuple(stores)
        self.tier = tuple(
            tier
            for tier, layout in enumerate(layouts)
            for _ in range(1 + (layout.format.block > 1))
        )
        self._members = tuple(members)
        self._room = PageReservation([self.stores])

    @property
    def tiers(self) -> int:
        """K."""
        return len(self._members)

    @property
    def parts(self) -> tuple[TokenStore, ...]:
        """The stores; with heads of several kinds there are more of them than `stores`."""
        return self.stores

    @property
    def settled(self) -> tuple[TokenStore, ...]:
        """The stores whose full pages do not change when tokens are appended."""
        each = (m.blocks if isinstance(m, ResidualTier) else m for m in self._members)
        return tuple(each)

    @property
    def members(self) -> tuple[TokenStore | ResidualTier, ...]:
        """The tiers, each one or two stores."""
        return self._members

    @property
    def in_blocks(self) -> bool:
        """Whether some tier encodes several tokens together; then steps synchronize."""
        return len(self.stores) > len(self._members)

    @property
    def pages_used(self) -> int:
        """Pages held by the tiers; synchronizes with the device."""
        return self.pages_held - sum(store.pages_repeated for store in self.stores)

    @property
    def pages_held(self) -> int:
        """Pages of each table row, added up: those of several rows count as often."""
        return int(torch.stack([store.held_pages().sum() for store in self.stores]).sum())

    @property
    def table_bytes(self) -> int:
        """Bytes of page tables and lengths."""
        return sum(store.table_bytes for store in self.stores)

    def table_rows(self, layers: slice = slice(None)) -> Int[Tensor, " S"]:
        """Return the ids of the table rows of some layers: ((layer * B) + sequence) * H + head."""
        return self.stores[0].table_rows(layers)

    def counts(self) -> Int[Tensor, "K N B H"]:
        """Return the number of tokens in each tier, without synchronizing."""
        if not self.in_blocks:
            return torch.stack([store.length for store in self.stores]).long()
        live = [torch.zeros_like(self.stores[0].live) for _ in range(self.tiers)]
        for tier, store in zip(self.tier, self.stores, strict=True):
            live[tier] = live[tier] + store.live
        return torch.stack(live)

    def views(self, layer: int) -> tuple[PagedTokens, ...]:
        """Return one layer of each possibly nonempty store; valid until the next operation."""
        return tuple(store.view(layer) for store in self.stores if store.longest)

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
            PoolExhausted: the pool has too few pages and may not grow.
            ValueError: shapes do not match, or scores or positions are missing or not stored here.
        """
        expect_some(self.stores)
        self._members[tier].append(table_rows, key, value, keep, score, position)

    def append_stored(
        self,
        tier: int,
        table_rows: Int[Tensor, " S"],
        source: CopiedRows,
        keep: Bool[Tensor, "S L"],
    ) -> None:
        """Encode stored tokens in a tier's format and append them, with scores and positions.

        Args:
            tier: the tier.
            table_rows: the table rows.
            source: their tokens, as `copied` of a store returns them.
            keep: the slots of the source whose tokens are appended.

        Raises:
            PoolExhausted: the pool has too few pages and may not grow.
            ValueError: shapes do not match, or the source has several kinds of heads, other
                dimensions, or no scores or positions.
        """
        expect_some(self.stores)
        if len(source) != 1 or source[0] is None:
            raise ValueError(f"the source has {len(source)} kinds of heads, and tiers have one")
        self._members[tier].append_stored(table_rows, source[0], keep)

    def marked(self, table_rows: Int[Tensor, " S"]) -> tuple[Mark, ...]:
        """Mark where table rows of the first tier end, to take back what is appended next."""
        return (Mark.of(self._members[0], table_rows),)

    def clear(self, sequences: Int[Tensor, " n"]) -> None:
        """Return all pages of finished sequences to the pool; the sequences remain, empty.

        Raises:
            ValueError: a sequence does not exist or is named twice.
        """
        for store in self.stores:
            store.clear(sequences)

    def truncate(self, length: Int[Tensor, " B"]) -> None:
        """Truncate each head of sequence b to at most its first length[b] tokens in each tier.

        These are the oldest tokens if tokens have only been appended.

        Raises:
            ValueError: a negative length, or not one length per sequence.
        """
        self.expect_cut(length)
        for member in self._members:
            member.truncate(length)

    def expect_cut(self, length: Int[Tensor, " B"]) -> None:
        """Raise if `truncate` would.

        Raises:
            ValueError: a negative length, not one length per sequence, or one inside a block.
        """
        expect_some(self.stores)
        self.stores[0].expect_lengths(length)
        for member in self._members:
            if isinstance(member, ResidualTier):
                member.expect_cut(length)

    def pages_for_more(self, tier: int, count: Int[Tensor, " S"]) -> Int[Tensor, ""]:
        """Return a bound of the pages for `count` more tokens of all table rows in a tier."""
        return self._members[tier].pages_for_more(count)

    def weakest(
        self, until: Int[Tensor, " S"] | None = None, first: int | None = None
    ) -> tuple[Float[Tensor, "K S"], Int[Tensor, "K S"]]:
        """Return each table row's lowest score per tier, and its place, without synchronizing.

        A place is a number for `step`; a tier without a token returns inf and place -1.

        Args:
            until: consider only tokens at positions before this, for each table row.
            first: consider only so many tiers, from the first; None: all.

        Raises:
            ValueError: pages store no scores, or no positions although `until` is given.
        """
        found = [member.weakest_all(until) for member in self._members[:first]]
        if len(found) < self.tiers:
            rows, device = self.stores[0].length.numel(), self.pool.device
            none = (
                torch.full((rows,), torch.inf, device=device),
                torch.full((rows,), -1, device=device),
            )
            found += [none] * (self.tiers - len(found))
        return torch.stack([score for score, _ in found]), torch.stack([at for _, at in found])

    def _step(self, choice: Placement, place: Int[Tensor, "K S"], token: NewTokens) -> None:
        self.expect_step(choice, place, token)
        if self.in_blocks:
            step_in_turn(self._members, choice, place, token)
            return
        self._room.for_step(lambda: pages_needed([self.work(choice, place, token)]))
        kernels = shared([store.kernels for store in self.stores])
        kernels.step(self.pool, [self.work(choice, place, token)])

    def work(self, choice: Placement, place: Int[Tensor, "K S"], token: NewTokens) -> DecodeStep:
        """Return a step as data; valid until the pool or a table grows."""
        return DecodeStep(tuple(store.whole() for store in self.stores), choice, place, token)

    def expect_step(self, choice: Placement, place: Int[Tensor, "K S"], token: NewTokens) -> None:
        """Raise if a step does not match the tiers.

        Raises:
            ValueError: shapes do not match, or scores or positions are missing or not stored here.
        """
        expect_some(self.stores)
        table_rows = self.stores[0].length.numel()
        for name in ("candidate", "victim", "target"):
            expect_shape(name, getattr(choice, name), table_rows)
        expect_shape("place", place, self.tiers, table_rows)
        first = self.stores[0]
        first.expect_tokens(token.key, token.value, token.score, token.position, table_rows)
