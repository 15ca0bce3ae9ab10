"""The raw window of heads whose vectors differ in length."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from kv_paging import Kinds
from kv_policy import CacheShape
from kv_serve.window import RawWindow, oldest_first


class RaggedWindow:
    """A `RawWindow` for each kind of heads; vectors come and go padded with zeros to the longest.

    Every slot holds what its head's kind takes and no more.
    """

    def __init__(
        self,
        kinds: Kinds,
        shapes: Sequence[CacheShape],
        sequences: int,
        size: int,
        device: torch.device,
        scores: bool,
    ) -> None:
        """Make empty rings for heads of these shapes, one a kind."""
        self.size = size
        self._kinds = kinds
        self._dims = max(s.key_dim for s in shapes), max(s.value_dim for s in shapes)
        self.members = tuple(
            RawWindow(replace(shape, layers=cells, kv_heads=1), sequences, size, device, scores)
            for shape, cells in zip(shapes, kinds.cells, strict=True)
        )

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(member.nbytes for member in self.members)

    @property
    def position(self) -> Int[Tensor, "B W"]:
        """Position of each slot's token, or -1."""
        return self.members[0].position

    @property
    def has_scores(self) -> bool:
        """Whether each token carries a score."""
        return self.members[0].has_scores

    def stays(self, position: Int[Tensor, "B S"], total: Int[Tensor, " B"]) -> Bool[Tensor, "B S"]:
        """Which positions are among the newest `size` of `total` tokens."""
        return self.members[0].stays(position, total)

    def keys(self, layer: int) -> Float[Tensor, "B H W D"]:
        """A layer's keys, by slot."""
        return self._layer(layer, [m.key for m in self.members], self._dims[0])

    def values(self, layer: int) -> Float[Tensor, "B H W Dv"]:
        """A layer's values, by slot."""
        return self._layer(layer, [m.value for m in self.members], self._dims[1])

    def scores(self, layer: int) -> Float[Tensor, "B H W"]:
        """A layer's scores, by slot."""
        each = [m.score[..., None] for m in self.members if m.score is not None]
        return self._layer(layer, each, 1)[..., 0]

    def set_scores(self, layer: int, score: Float[Tensor, "B H W"]) -> None:
        """Give a layer's tokens new scores."""
        for kind, member in enumerate(self.members):
            heads, span = self._kinds.heads(kind, layer), self._kinds.span(kind, layer)
            if len(heads) and member.score is not None:
                member.score[span] = score[:, heads].transpose(0, 1)[:, :, None]

    def of_kind(
        self, kind: int, layer: int
    ) -> tuple[Float[Tensor, "B h W D"], Float[Tensor, "B h W Dv"]]:
        """Keys and values of a layer's heads of one kind, as they lie."""
        member, span = self.members[kind], self._kinds.span(kind, layer)
        return member.key[span, :, 0].transpose(0, 1), member.value[span, :, 0].transpose(0, 1)

    def put(
        self,
        layers: slice,
        key: Float[Tensor, "1 B H L D"],
        value: Float[Tensor, "1 B H L Dv"],
        position: Int[Tensor, "B L"],
        total: Int[Tensor, " B"],
        score: Float[Tensor, "1 B H L"] | None = None,
    ) -> None:
        """Write a layer's fresh tokens that stay into their slots."""
        for kind, member in enumerate(self.members):
            heads, span = (
                self._kinds.heads(kind, layers.start),
                self._kinds.span(kind, layers.start),
            )
            if len(heads):
                member.put(
                    span,
                    _by_cell(key[0], heads, member.key.shape[-1]),
                    _by_cell(value[0], heads, member.value.shape[-1]),
                    position,
                    total,
                    None if score is None else _by_cell(score[0][..., None], heads, 1)[..., 0],
                )

    def advance(self, position: Int[Tensor, "B L"], total: Int[Tensor, " B"]) -> None:
        """Note the positions of what `put` wrote, once all layers have written."""
        for member in self.members:
            member.advance(position, total)

    def in_order(
        self, layer: int
    ) -> tuple[Float[Tensor, "B H W D"], Float[Tensor, "B H W Dv"], Int[Tensor, "B W"]]:
        """One layer's keys, values and positions, oldest first; empty slots (-1) lead."""
        return oldest_first(self.keys(layer), self.values(layer), self.position)

    def exchange(
        self,
        key: Float[Tensor, "N B H 1 D"],
        value: Float[Tensor, "N B H 1 Dv"],
        position: Int[Tensor, "B 1"],
        total: Int[Tensor, " B"],
        score: Float[Tensor, "N B H 1"] | None = None,
    ) -> tuple[
        Float[Tensor, "N B H 1 D"],
        Float[Tensor, "N B H 1 Dv"],
        Int[Tensor, "B 1"],
        Float[Tensor, "N B H 1"] | None,
    ]:
        """Put one fresh token per sequence and give the one it pushes out, as `RawWindow` does."""
        out = torch.zeros_like(key), torch.zeros_like(value)
        out_score = None if score is None else torch.zeros_like(score)
        left = position
        for kind, member in enumerate(self.members):
            layer, head = self._kinds.where(kind)
            dims = member.key.shape[-1], member.value.shape[-1]
            found = member.exchange(
                key[layer, :, head, :, : dims[0]][:, :, None],
                value[layer, :, head, :, : dims[1]][:, :, None],
                position,
                total,
                None if score is None else score[layer, :, head][:, :, None],
            )
            for whole, part, dim in zip(out, found[:2], dims, strict=True):
                whole[layer, :, head, :, :dim] = part[:, :, 0].to(whole.dtype)
            if out_score is not None and found[3] is not None:
                out_score[layer, :, head] = found[3][:, :, 0]
            left = found[2]
        return *out, left, out_score

    def select(self, source: Int[Tensor, " B2"]) -> None:
        """Sequences become source[0], source[1], ..."""
        for member in self.members:
            member.select(source)

    def _layer(self, layer: int, each: Sequence[Tensor], dim: int) -> Tensor:
        """A layer's vectors of all kinds side by side; `each` is [cells, B, 1, W, d]."""
        _, sequences, _, size, _ = each[0].shape
        whole = each[0].new_zeros(sequences, self._kinds.kind.shape[1], size, dim)
        for kind, x in enumerate(each):
            found = x[self._kinds.span(kind, layer), :, 0].transpose(0, 1)
            whole[:, self._kinds.heads(kind, layer)] = pad(found, (0, dim - x.shape[-1]))
        return whole


def _by_cell(x: Float[Tensor, "B H L D"], heads: Tensor, dim: int) -> Float[Tensor, "h B 1 L d"]:
    return x[:, heads, :, :dim].transpose(0, 1)[:, :, None]
