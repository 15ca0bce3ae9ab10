"""Heads of several kinds, and where their table rows are among those of their kind."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor


class RankGroups:
    """The rows of N layers, B sequences and H heads, sorted by the kind of their layer and head.

    A table row has the number ((layer * B) + sequence) * H + head among all, and among those of its
    kind cell * B + sequence, where cells are the pairs of layer and head of that kind, in order.
    """

    def __init__(self, kind: Int[Tensor, "N H"], sequences: int) -> None:
        """Sort the heads; kinds are numbered from 0, with none left out."""
        self.kind = kind
        self.sequences = sequences
        self.heads_of: list[list[int]] = kind.tolist()
        self.count = max(map(max, self.heads_of)) + 1
        self._where = [(kind == i).nonzero() for i in range(self.count)]
        self.cells = tuple(map(len, self._where))
        if 0 in self.cells:
            raise ValueError(f"no head is of kind {self.cells.index(0)}; leave that kind out")
        cell = torch.zeros_like(kind)
        for where in self._where:
            cell[where[:, 0], where[:, 1]] = torch.arange(len(where), device=kind.device)
        self._cell = cell
        each = torch.stack([(kind == i).sum(1) for i in range(self.count)]).cpu()
        self._ends = each.cumsum(1).tolist()

    def where(self, kind: int) -> tuple[Int[Tensor, " cells"], Int[Tensor, " cells"]]:
        """The layer and the head of each cell of a kind."""
        layer, head = self._where[kind].T
        return layer, head

    def span(self, kind: int, layer: int) -> slice:
        """The cells of a kind that are of this layer."""
        ends = self._ends[kind]
        return slice(ends[layer - 1] if layer else 0, ends[layer])

    def heads(self, kind: int, layer: int) -> Int[Tensor, " h"]:
        """The heads of a layer that are of this kind, in order."""
        where: Tensor = self._where[kind][self.span(kind, layer)]
        return where[:, 1]

    def layers(self, layers: slice) -> range:
        """The numbers of some layers."""
        return range(len(self.heads_of))[layers]

    def table_rows(self, layers: slice = slice(None)) -> Int[Tensor, " S"]:
        """The numbers of the table rows of some layers."""
        layer_count, heads = self.kind.shape
        every = torch.arange(layer_count * self.sequences * heads, device=self.kind.device)
        return every.view(layer_count, -1)[layers].flatten()

    def rows(self, kind: int) -> Int[Tensor, " S"]:
        """The numbers that the table rows of a kind have among all, in the order of their own."""
        layer, head = self._where[kind].T[..., None]
        sequence = torch.arange(self.sequences, device=layer.device)
        number: Tensor = (layer * self.sequences + sequence) * self.kind.shape[1] + head
        return number.flatten()

    def split(
        self, table_rows: Int[Tensor, " S"]
    ) -> list[tuple[Int[Tensor, " n"], Int[Tensor, " n"]]]:
        """Say of each kind where in the list its rows are, and their numbers among their own."""
        heads = self.kind.shape[1]
        layer = table_rows // (heads * self.sequences)
        sequence, head = table_rows // heads % self.sequences, table_rows % heads
        kind = self.kind[layer, head]
        own = self._cell[layer, head] * self.sequences + sequence
        places = [(kind == i).nonzero()[:, 0] for i in range(self.count)]
        return [(place, own[place]) for place in places]

    def all_table_rows(
        self, table_rows: Int[Tensor, " S"], number: Int[Tensor, " S"]
    ) -> list[Int[Tensor, " n"]]:
        """Give each kind a number for all its table rows: those named get theirs, others 0."""
        every = torch.zeros(
            self.kind.numel() * self.sequences, dtype=number.dtype, device=number.device
        )
        every[table_rows] = number
        return [every[self.rows(i)] for i in range(self.count)]

    def by_table_row(self, each: Sequence[Tensor]) -> Tensor:
        """What is [K, table_rows] of each kind, over all table rows."""
        whole = each[0].new_zeros(len(each[0]), self.kind.numel() * self.sequences)
        for i, part in enumerate(each):
            whole[:, self.rows(i)] = part
        return whole

    def by_cell(self, each: Sequence[Tensor]) -> Tensor:
        """What is [K, cells, B] of each kind, as [K, N, B, H]."""
        layers, heads = self.kind.shape
        whole = each[0].new_zeros(layers, heads, len(each[0]), each[0].shape[2])
        for where, part in zip(self._where, each, strict=True):
            whole[where[:, 0], where[:, 1]] = part.transpose(0, 1)
        return whole.permute(2, 0, 3, 1)
