"""The raw window of heads with different vector lengths."""

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from kv_attention import DenseTokens
from kv_paging import RankGroups, TokenStore, select_all
from kv_policy import PagedTokens
from kv_runtime.window.base import (
    ALL,
    InOrder,
    Left,
    RingBuffer,
    Window,
    expect_alike,
    oldest_first,
)


class RaggedWindow(Window):
    """Ring buffers per kind of head; inputs and outputs are zero-padded to the longest vector.

    Each slot stores only the dimensions of its head's kind.
    """

    def __init__(self, kinds: RankGroups, members: Sequence[RingBuffer]) -> None:
        """Combine the ring buffers of all kinds, each with one cell per layer and a single head."""
        self._kinds = kinds
        self.members = tuple(members)
        self._dims = max(m.dims[0] for m in members), max(m.dims[1] for m in members)

    @property
    def size(self) -> int:
        """W, tokens per sequence."""
        return self.members[0].size

    @property
    def nbytes(self) -> int:
        """Bytes outside the pool."""
        return sum(member.nbytes for member in self.members)

    @property
    def position(self) -> Int[Tensor, "B W"]:
        """Position of each slot's token, or -1."""
        return self.members[0].position

    @property
    def has_scores(self) -> bool:
        """Whether each token has a score."""
        return self.members[0].has_scores

    @property
    def stores(self) -> tuple[TokenStore, ...]:
        """The stores of the slots; empty if members have separate memory."""
        return tuple(store for member in self.members for store in member.stores)

    def stays(self, position: Int[Tensor, "B S"], total: Int[Tensor, " B"]) -> Bool[Tensor, "B S"]:
        """Return which positions are among the newest `size` of `total` tokens."""
        return self.members[0].stays(position, total)

    def keys_of(self, layers: slice) -> Float[Tensor, "n B H W D"]:
        """Return the keys of layers, by slot."""
        return self._each(layers, lambda rings, cells: rings.keys_of(cells), self._dims[0])

    def values_of(self, layers: slice) -> Float[Tensor, "n B H W Dv"]:
        """Return the values of layers, by slot."""
        return self._each(layers, lambda rings, cells: rings.values_of(cells), self._dims[1])

    def scores_of(self, layers: slice) -> Float[Tensor, "n B H W"]:
        """Return the scores of layers, by slot.

        Raises:
            ValueError: tokens have no scores.
        """
        return self._each(layers, lambda rings, cells: rings.scores_of(cells)[..., None], 1)[..., 0]

    def set_scores_of(self, layers: slice, score: Float[Tensor, "n B H W"]) -> None:
        """Set the scores of layers' tokens.

        Raises:
            ValueError: tokens have no scores.
        """
        for layer, mine in zip(self._kinds.layers(layers), score, strict=True):
            for kind, member in enumerate(self.members):
                heads, span = self._kinds.heads(kind, layer), self._kinds.span(kind, layer)
                if len(heads):
                    member.set_scores_of(span, mine[:, heads].transpose(0, 1)[:, :, None])

    def view_kind(self, kind: int, layer: int) -> PagedTokens | DenseTokens:
        """Return a layer's heads of one kind for attention."""
        return self.members[kind].view(self._kinds.span(kind, layer))

    def put(
        self,
        layers: slice,
        key: Float[Tensor, "1 B H L D"],
        value: Float[Tensor, "1 B H L Dv"],
        position: Int[Tensor, "B L"],
        total: Int[Tensor, " B"],
        score: Float[Tensor, "1 B H L"] | None = None,
    ) -> None:
        """Write a layer's new tokens that stay in the window to their slots."""
        for kind, member in enumerate(self.members):
            heads, span = (
                self._kinds.heads(kind, layers.start),
                self._kinds.span(kind, layers.start),
            )
            if len(heads):
                member.put(
                    span,
                    _by_cell(key[0], heads, member.dims[0]),
                    _by_cell(value[0], heads, member.dims[1]),
                    position,
                    total,
                    None if score is None else _by_cell(score[0][..., None], heads, 1)[..., 0],
                )

    def advance(self, position: Int[Tensor, "B L"], total: Int[Tensor, " B"]) -> None:
        """Record the positions of tokens written by `put`, after all layers."""
        for member in self.members:
            member.advance(position, total)

    def in_order(self, layer: int) -> InOrder:
        """Return a layer's keys, values and positions, oldest first; empty slots (-1) lead."""
        return oldest_first(self.keys(layer), self.values(layer), self.position)

    def exchange(
        self,
        key: Float[Tensor, "N B H 1 D"],
        value: Float[Tensor, "N B H 1 Dv"],
        position: Int[Tensor, "B 1"],
        total: Int[Tensor, " B"],
        score: Float[Tensor, "N B H 1"] | None = None,
        layers: slice = ALL,
    ) -> Left:
        """Write one new token per sequence and return the replaced one, as `RawWindow` does."""
        out = torch.zeros_like(key), torch.zeros_like(value)
        out_score = None if score is None else torch.zeros_like(score)
        left, some = position, self._kinds.layers(layers)
        for kind, member in enumerate(self.members):
            first, last = (self._kinds.span(kind, some[i]) for i in (0, -1))
            cells = slice(first.start, last.stop)
            layer, head = (each[cells] for each in self._kinds.where(kind))
            if not len(layer):
                continue
            layer, dims = layer - some[0], member.dims
            found = member.exchange(
                key[layer, :, head, :, : dims[0]][:, :, None],
                value[layer, :, head, :, : dims[1]][:, :, None],
                position,
                total,
                None if score is None else score[layer, :, head][:, :, None],
                cells,
            )
            for whole, part, dim in zip(out, found[:2], dims, strict=True):
                whole[layer, :, head, :, :dim] = part[:, :, 0].to(whole.dtype)
            if out_score is not None and found[3] is not None:
                out_score[layer, :, head] = found[3][:, :, 0]
            left = found[2]
        return *out, left, out_score

    def select(self, source: Int[Tensor, " B2"]) -> None:
        """Reorder sequences to source[0], source[1], ...

        Raises:
            kv_paging.PoolExhausted: too few pages for the copies, after freeing dropped sequences.
            ValueError: a sequence does not exist, or `source` is empty.
        """
        if self.stores:
            select_all(self.stores, source)
        self.reorder(source)

    def reorder(self, source: Int[Tensor, " B2"]) -> None:
        """Do the part of `select` outside `stores`."""
        for member in self.members:
            member.reorder(source)

    def join(self, other: Window) -> None:
        """Append another window's sequences, which empties it.

        Raises:
            ValueError: its type, size, shape or pool differs; nothing has changed.
        """
        self.expect_join(other)
        assert isinstance(other, RaggedWindow)  # checked by expect_join
        for mine, theirs in zip(self.members, other.members, strict=True):
            mine.join(theirs)

    def adopt(self, sequence: int, other: Window) -> None:
        """Replace an empty sequence by the only one of another window, as `Window.adopt`.

        Raises:
            ValueError: its type, size, shape or pool differs; nothing has changed.
        """
        self.expect_join(other)
        assert isinstance(other, RaggedWindow)  # checked by expect_join
        for mine, theirs in zip(self.members, other.members, strict=True):
            mine.adopt(sequence, theirs)

    def branch(self, sequence: int, other: Window) -> None:
        """Let the only sequence of another window have a copy of one, outside `stores`."""
        assert isinstance(other, RaggedWindow), "both are of one policy"
        for mine, theirs in zip(self.members, other.members, strict=True):
            mine.branch(sequence, theirs)

    def clear(self, sequences: Int[Tensor, " n"]) -> None:
        """Do the part of emptying sequences outside `stores`, in place."""
        for member in self.members:
            member.clear(sequences)

    def hold_newest(self, seen: Int[Tensor, " B"]) -> None:
        """Set the positions of the slots after `seen` tokens of each sequence."""
        for member in self.members:
            member.hold_newest(seen)

    def forget_tiles(self) -> None:
        """Let the next attention count tiles again."""
        for member in self.members:
            member.forget_tiles()

    def expect_join(self, other: Window) -> None:
        """Raise if `join` would.

        Raises:
            ValueError: its type, size, shape or pool differs.
        """
        expect_alike(self, other)
        assert isinstance(other, RaggedWindow)  # checked by expect_join
        if self._kinds.heads_of != other._kinds.heads_of:
            raise ValueError("the windows have different kinds of heads; both need the same")
        for mine, theirs in zip(self.members, other.members, strict=True):
            mine.expect_join(theirs)

    def release(self) -> None:
        """Remove all sequences."""
        for member in self.members:
            member.release()

    def tensors(self) -> dict[str, Tensor]:
        """Return what the slots of each kind hold, by `kind.name`."""
        return {f"{i}.{k}": x for i, m in enumerate(self.members) for k, x in m.tensors().items()}

    def restore(self, tensors: Mapping[str, Tensor], seen: Int[Tensor, " B"]) -> None:
        """Fill the slots from `tensors` of another window of this shape."""
        for i, member in enumerate(self.members):
            mine = f"{i}."
            found = {k.removeprefix(mine): x for k, x in tensors.items() if k.startswith(mine)}
            member.restore(found, seen)

    def _each(
        self, layers: slice, read: Callable[[RingBuffer, slice], Tensor], dim: int
    ) -> Float[Tensor, "n B H W _"]:
        return torch.stack([self._layer(i, read, dim) for i in self._kinds.layers(layers)])

    def _layer(self, layer: int, read: Callable[[RingBuffer, slice], Tensor], dim: int) -> Tensor:
        """Concatenate a layer's vectors of all kinds; `read` returns [cells, B, 1, W, d]."""
        whole: Tensor | None = None
        for kind, member in enumerate(self.members):
            heads, span = self._kinds.heads(kind, layer), self._kinds.span(kind, layer)
            if not len(heads):
                continue
            found = read(member, span)[:, :, 0].transpose(0, 1)
            if whole is None:
                shape = (len(found), self._kinds.kind.shape[1], self.size, dim)
                whole = found.new_zeros(shape)
            whole[:, heads] = pad(found, (0, dim - found.shape[-1]))
        assert whole is not None  # every layer has heads
        return whole


def _by_cell(x: Float[Tensor, "B H L D"], heads: Tensor, dim: int) -> Float[Tensor, "h B 1 L d"]:
    return x[:, heads, :, :dim].transpose(0, 1)[:, :, None]
