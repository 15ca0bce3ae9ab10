"""One tier of heads whose vectors differ in rank, with the interface of one store."""

from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from kv_paging.checks import expect_shape
from kv_paging.rank_groups import RankGroups
from kv_paging.store import TokenStore
from kv_paging.tokens import NONE, Stored, VectorNames
from kv_paging.work import CopiedRows
from kv_policy import PagedTokens, Running


class PerHeadRankStore:
    """The stores of all kinds of heads, over all table rows; vectors are zero-padded.

    Row numbers are those of a store without kinds. Errors are those of `members`.
    """

    def __init__(self, kinds: RankGroups, members: Sequence[TokenStore]) -> None:
        """Combine stores, one per kind, each with a layer per cell and a single head."""
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
        """An upper bound of the slots per table row."""
        return max(member.longest for member in self.members)

    def pages(self) -> Int[Tensor, " n"]:
        """Return the ids of all pages held by the table rows; for `PagePool.check`."""
        return torch.cat([member.pages() for member in self.members])

    def table_rows(self, layers: slice = slice(None)) -> Int[Tensor, " S"]:
        """Return the ids of the table rows of some layers: ((layer * B) + sequence) * H + head."""
        return self._kinds.table_rows(layers)

    def view_kind(self, kind: int, layer: int) -> PagedTokens | None:
        """Return a layer's heads of one kind as attention reads them; None if they are empty."""
        member, span = self.members[kind], self._kinds.span(kind, layer)
        if span.start == span.stop or not member.longest:
            return None
        return member.view_layers(span)

    def read_layer(self, layer: int, vectors: VectorNames = NONE) -> Stored:
        """Return the tokens in the table rows of a layer, over `longest` slots."""
        return self.read_layers(slice(layer, layer + 1), vectors)

    def read_layers(self, layers: slice, vectors: VectorNames = NONE) -> Stored:
        """Return the tokens in the table rows of some layers, as `read_layer`."""
        members = self._members(layers)
        found = [(rows, member.read_layers(span, vectors)) for member, span, rows in members]
        return _joined(found, self._count(layers), self.longest, self._dims)

    def read(self, table_rows: Int[Tensor, " S"], vectors: VectorNames = NONE) -> Stored:
        """Return the tokens in table rows, as TokenStore."""
        split = self._kinds.split(table_rows)
        found = [
            (place, member.read(own, vectors))
            for member, (place, own) in zip(self.members, split, strict=True)
            if len(own)
        ]
        longest = max((read.held.shape[1] for _, read in found), default=0)
        return _joined(found, len(table_rows), longest, self._dims)

    def copied(self, table_rows: Int[Tensor, " S"]) -> CopiedRows:
        """Return the tokens in table rows as they are stored, by kind of heads, as TokenStore."""
        split = self._kinds.split(table_rows)
        return tuple(
            member.copied(own)[0] if len(own) else None
            for member, (_, own) in zip(self.members, split, strict=True)
        )

    def set_layer_scores(self, layer: int, score: Float[Tensor, "S L"]) -> None:
        """Set the scores of a layer's tokens, slot by slot as in `read_layer`.

        Raises:
            ValueError: pages store no scores, or fewer slots than `longest` are given.
        """
        self.set_layers_scores(slice(layer, layer + 1), score)

    def set_layers_scores(self, layers: slice, score: Float[Tensor, "S L"]) -> None:
        """Set the scores of some layers' tokens, slot by slot as in `read_layers`.

        Raises:
            ValueError: pages store no scores, or fewer slots than `longest` are given.
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
        """Update the scores of some layers' tokens with a pass, as TokenStore.

        Raises:
            ValueError: pages store no scores or positions, or fewer slots than `longest` are given.
        """
        count = self._count(layers)
        expect_shape("before", before, count)
        for name, x in (("mass", mass), ("seen", seen)):
            expect_shape(name, x, count, None)
        for member, span, rows in self._members(layers):
            member.accumulate_layers(span, before[rows], mass[rows], seen[rows], running)

    def compact(self, table_rows: Int[Tensor, " S"], keep: Bool[Tensor, "S L"]) -> int:
        """Evict the tokens not marked by `keep`; return whole pages to the pool.

        Returns:
            The number of pages returned to the pool.

        Raises:
            ValueError: `keep` does not cover all tokens.
        """
        expect_shape("keep", keep, table_rows.shape[0], None)
        split = self._kinds.split(table_rows)
        return sum(
            member.compact(own, keep[place])
            for member, (place, own) in zip(self.members, split, strict=True)
            if len(own)
        )

    def rewrite(
        self,
        table_rows: Int[Tensor, " S"],
        some: Bool[Tensor, "S L"],
        key: Float[Tensor, "n D"] | None,
        value: Float[Tensor, "n Dv"],
    ) -> None:
        """Encode other vectors for the marked tokens in place, as TokenStore."""
        expect_shape("some", some, table_rows.shape[0], None)
        row, split = some.nonzero()[:, 0], self._kinds.split(table_rows)
        each = [(m, *of) for m, of in zip(self.members, split, strict=True) if len(of[1])]
        for member, place, own in each:
            member.own(own, some[place])  # of all kinds, before any is written
        for member, place, own in each:
            mine, form = torch.isin(row, place), member.layout.format
            wide = None if key is None else key[mine, : form.key.dim]
            member.rewrite(own, some[place], wide, value[mine, : form.value.dim])

    @property
    def _dims(self) -> tuple[int, int]:
        forms = [member.layout.format for member in self.members]
        return max(f.key.dim for f in forms), max(f.value.dim for f in forms)

    def _count(self, layers: slice) -> int:
        """Return the number of table rows of some layers."""
        return len(self._kinds.layers(layers)) * self._kinds.sequences * self._kinds.kind.shape[1]

    def _members(self, layers: slice) -> Iterator[tuple[TokenStore, slice, Int[Tensor, " n"]]]:
        """Yield each store with rows of some layers, its layers, and the indices of these rows."""
        before = 0
        for layer in self._kinds.layers(layers):
            for kind, member in enumerate(self.members):
                span = self._kinds.span(kind, layer)
                if span.start < span.stop:
                    yield member, span, before + self._rows(kind, layer)
            before += self._count(slice(layer, layer + 1))

    def _rows(self, kind: int, layer: int) -> Int[Tensor, " n"]:
        """Return the indices of a kind's rows among a layer's table rows, in the kind's order."""
        heads = self._kinds.heads(kind, layer)
        sequence = torch.arange(self._kinds.sequences, device=heads.device)
        return (sequence * self._kinds.kind.shape[1] + heads[:, None]).flatten()


def _joined(
    found: Sequence[tuple[Tensor, Stored]], table_rows: int, longest: int, dims: tuple[int, int]
) -> Stored:
    """Combine the tokens of several kinds, by the indices of their table rows."""

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
