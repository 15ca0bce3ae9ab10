"""One tier of heads whose vectors differ in length, seen as one store."""

from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from kv_paging.checks import expect_shape
from kv_paging.rank_groups import RankGroups
from kv_paging.store import TokenStore
from kv_paging.tokens import NONE, Stored, VectorNames
from kv_policy import PagedTokens, Running


class PerHeadRankStore:
    """The stores of all kinds of heads, over all table rows; vectors are padded with zeros.

    Rows have the numbers they have in a store without kinds. What `members` refuse is refused.
    """

    def __init__(self, kinds: RankGroups, members: Sequence[TokenStore]) -> None:
        """Join stores, one a kind, each with a layer for each of its cells and a single head."""
        self._kinds = kinds
        self.members = tuple(members)

    @property
    def length(self) -> Int[Tensor, "N B H"]:
        """Slots in each table row."""
        return self._kinds.by_cell([m.length[None, ..., 0] for m in self.members])[0]

    @property
    def live(self) -> Int[Tensor, "N B H"]:
        """Tokens in each table row."""
        return self._kinds.by_cell([m.live[None, ..., 0] for m in self.members])[0]

    @property
    def longest(self) -> int:
        """No table row has more slots."""
        return max(member.longest for member in self.members)

    def pages(self) -> Int[Tensor, " n"]:
        """Give the ids of all pages the table rows hold; for `PagePool.check`."""
        return torch.cat([member.pages() for member in self.members])

    def table_rows(self, layers: slice = slice(None)) -> Int[Tensor, " S"]:
        """Give the ids of the table rows of some layers: ((layer * B) + sequence) * H + head."""
        return self._kinds.table_rows(layers)

    def view_kind(self, kind: int, layer: int) -> PagedTokens | None:
        """Give a layer's heads of one kind as attention reads them; None: they hold nothing."""
        member, span = self.members[kind], self._kinds.span(kind, layer)
        if span.start == span.stop or not member.longest:
            return None
        return member.view_layers(span)

    def read_layer(self, layer: int, vectors: VectorNames = NONE) -> Stored:
        """Give what the table rows of a layer hold, over `longest` slots."""
        return self.read_layers(slice(layer, layer + 1), vectors)

    def read_layers(self, layers: slice, vectors: VectorNames = NONE) -> Stored:
        """Give what the table rows of some layers hold, as `read_layer` does."""
        members = self._members(layers)
        found = [(rows, member.read_layers(span, vectors)) for member, span, rows in members]
        return _joined(found, self._count(layers), self.longest, self._dims)

    def read(self, table_rows: Int[Tensor, " S"], vectors: VectorNames = NONE) -> Stored:
        """Give what table rows hold, as TokenStore does."""
        split = self._kinds.split(table_rows)
        found = [
            (place, member.read(own, vectors))
            for member, (place, own) in zip(self.members, split, strict=True)
            if len(own)
        ]
        longest = max((read.held.shape[1] for _, read in found), default=0)
        return _joined(found, len(table_rows), longest, self._dims)

    def set_layer_scores(self, layer: int, score: Float[Tensor, "S L"]) -> None:
        """Give the tokens of a layer new scores, slot by slot as `read_layer` has them.

        Raises:
            ValueError: pages hold no scores, or fewer slots than `longest` says are given.
        """
        self.set_layers_scores(slice(layer, layer + 1), score)

    def set_layers_scores(self, layers: slice, score: Float[Tensor, "S L"]) -> None:
        """Give the tokens of some layers new scores, slot by slot as `read_layers` has them.

        Raises:
            ValueError: pages hold no scores, or fewer slots than `longest` says are given.
        """
        expect_shape("score", score, self._count(layers), None)
        for member, span, rows in self._members(layers):
            member.set_layers_scores(span, score[rows])

    def accumulate_layers(
        self,
        layers: slice,
        before: Int[Tensor, " S"],
        mass: Float[Tensor, "S L"],
        seen: Int[Tensor, "S L"],
        running: Running,
    ) -> None:
        """Let the scores of some layers' tokens go on with a pass, as TokenStore does.

        Raises:
            ValueError: pages hold no scores or positions, or fewer slots than `longest` are given.
        """
        count = self._count(layers)
        expect_shape("before", before, count)
        for name, x in (("mass", mass), ("seen", seen)):
            expect_shape(name, x, count, None)
        for member, span, rows in self._members(layers):
            member.accumulate_layers(span, before[rows], mass[rows], seen[rows], running)

    def compact(self, table_rows: Int[Tensor, " S"], keep: Bool[Tensor, "S L"]) -> int:
        """Let go of the tokens not marked by `keep`; whole pages go back to the pool.

        Returns:
            Pages that went back.

        Raises:
            ValueError: `keep` says nothing about some tokens.
        """
        expect_shape("keep", keep, table_rows.shape[0], None)
        split = self._kinds.split(table_rows)
        return sum(
            member.compact(own, keep[place])
            for member, (place, own) in zip(self.members, split, strict=True)
            if len(own)
        )

    @property
    def _dims(self) -> tuple[int, int]:
        forms = [member.layout.format for member in self.members]
        return max(f.key.dim for f in forms), max(f.value.dim for f in forms)

    def _count(self, layers: slice) -> int:
        """Table rows of some layers."""
        return len(self._kinds.layers(layers)) * self._kinds.sequences * self._kinds.kind.shape[1]

    def _members(self, layers: slice) -> Iterator[tuple[TokenStore, slice, Int[Tensor, " n"]]]:
        """Where the rows of some layers are: a store, its layers, and which of the table rows."""
        before = 0
        for layer in self._kinds.layers(layers):
            for kind, member in enumerate(self.members):
                span = self._kinds.span(kind, layer)
                if span.start < span.stop:
                    yield member, span, before + self._rows(kind, layer)
            before += self._count(slice(layer, layer + 1))

    def _rows(self, kind: int, layer: int) -> Int[Tensor, " n"]:
        """Where, among a layer's table rows, those of a kind are, in the order of their own."""
        heads = self._kinds.heads(kind, layer)
        sequence = torch.arange(self._kinds.sequences, device=heads.device)
        return (sequence * self._kinds.kind.shape[1] + heads[:, None]).flatten()


def _joined(
    found: Sequence[tuple[Tensor, Stored]], table_rows: int, longest: int, dims: tuple[int, int]
) -> Stored:
    """Lay what kinds hold side by side, by the places of their table rows."""

    def whole(part: Callable[[Stored], Tensor | None], fill: int, dim: int = 0) -> Tensor | None:
        out: Tensor | None = None
        for place, read in found:
            x = part(read)
            if x is None:
                return None
            wide = (0, dim - x.shape[2]) if dim else ()
            x = pad(x, (*wide, 0, longest - x.shape[1]), value=fill)
            if out is None:
                out = x.new_full((table_rows, *x.shape[1:]), fill)
            out[place] = x
        return out

    held = whole(lambda read: read.held, 0)
    assert held is not None  # there are table rows
    return Stored(
        held,
        whole(lambda read: read.score, 0),
        whole(lambda read: read.position, -1),
        whole(lambda read: read.key, 0, dims[0]),
        whole(lambda read: read.value, 0, dims[1]),
    )
