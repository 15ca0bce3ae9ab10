"""Heads of several kinds, and the mapping between all table rows and those of a kind."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor


class RankGroups:
    """The rows of N layers, B sequences and H heads, grouped by the kind of their layer and head.

    A table row has the number ((layer * B) + sequence) * H + head among all, and the number
    cell * B + sequence in its kind, where cells are the (layer, head) pairs of the kind, in order.
    """

    def __init__(self, kind: Int[Tensor, "N H"], sequences: int) -> None:
        """Group the heads; kinds are numbered from 0 without gaps."""
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
        cells: list[list[int]] = cell.tolist()
        # By layer, each head's kind, cell and number.
        self.by_layer = tuple(
            tuple(zip(own, at, range(len(own)), strict=True))
            for own, at in zip(self.heads_of, cells, strict=True)
        )
        self._order = torch.zeros(0, dtype=torch.long, device=kind.device)
        each = torch.stack([(kind == i).sum(1) for i in range(self.count)]).cpu()
        self._ends = each.cumsum(1).tolist()

    def where(self, kind: int) -> tuple[Int[Tensor, " cells"], Int[Tensor, " cells"]]:
        """Return the layer and the head of each cell of a kind."""
        layer, head = self._where[kind].T
        return layer, head

    def span(self, kind: int, layer: int) -> slice:
        """Return the cells of a kind in this layer."""
        ends = self._ends[kind]
        return slice(ends[layer - 1] if layer else 0, ends[layer])

    def heads(self, kind: int, layer: int) -> Int[Tensor, " h"]:
        """Return the heads of a layer with this kind, in order."""
        where: Tensor = self._where[kind][self.span(kind, layer)]
        return where[:, 1]

    def layers(self, layers: slice) -> range:
        """Return the numbers of some layers."""
        return range(len(self.heads_of))[layers]

    def table_rows(self, layers: slice = slice(None)) -> Int[Tensor, " S"]:
        """Return the numbers of the table rows of some layers."""
        layer_count, heads = self.kind.shape
        every = torch.arange(layer_count * self.sequences * heads, device=self.kind.device)
        return every.view(layer_count, -1)[layers].flatten()

    def rows(self, kind: int) -> Int[Tensor, " S"]:
        """Return the numbers of a kind's table rows among all, in the kind's order."""
        layer, head = self._where[kind].T[..., None]
        sequence = torch.arange(self.sequences, device=layer.device)
        number: Tensor = (layer * self.sequences + sequence) * self.kind.shape[1] + head
        return number.flatten()

    def cut(self, x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        """Return, per kind, what a dimension has for its table rows, in the kind's order.

        Args:
            x: a tensor with all table rows in one of its dimensions.
            dim: the dimension.
        """
        if len(self._order) != self.kind.numel() * self.sequences:  # sequences came or went
            self._order = torch.cat([self.rows(i) for i in range(self.count)])
        ordered = x.index_select(dim, self._order)
        return torch.split(ordered, [n * self.sequences for n in self.cells], dim)

    def split(
        self, table_rows: Int[Tensor, " S"]
    ) -> list[tuple[Int[Tensor, " n"], Int[Tensor, " n"]]]:
        """Return, per kind, the indices of its rows in the list, and their numbers in the kind."""
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
        """Return, per kind, a number for all its table rows: 0 for rows that are not named."""
        every = torch.zeros(
            self.kind.numel() * self.sequences, dtype=number.dtype, device=number.device
        )
        every[table_rows] = number
        return [every[self.rows(i)] for i in range(self.count)]

    def by_table_row(self, each: Sequence[Tensor]) -> Tensor:
        """Combine [K, table_rows] tensors of each kind into one over all table rows."""
        whole = each[0].new_zeros(len(each[0]), self.kind.numel() * self.sequences)
        for i, part in enumerate(each):
            whole[:, self.rows(i)] = part
        return whole

    def by_cell(self, each: Sequence[Tensor]) -> Tensor:
        """Combine [K, cells, B] tensors of each kind into [K, N, B, H]."""
        layers, heads = self.kind.shape
        whole = each[0].new_zeros(layers, heads, len(each[0]), each[0].shape[2])
        for where, part in zip(self._where, each, strict=True):
            whole[where[:, 0], where[:, 1]] = part.transpose(0, 1)
        return whole.permute(2, 0, 3, 1)
