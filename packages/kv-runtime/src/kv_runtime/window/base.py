"""The recent window of each sequence as a ring buffer, independent of where slots are stored."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_attention import DenseTokens
from kv_paging import TokenStore
from kv_policy import PagedTokens, Running

Left: TypeAlias = tuple[  # returned by `exchange`: keys, values, positions, scores
    Float[Tensor, "N B H 1 D"],
    Float[Tensor, "N B H 1 Dv"],
    Int[Tensor, "B 1"],
    Float[Tensor, "N B H 1"] | None,
]
InOrder: TypeAlias = tuple[
    Float[Tensor, "B H W D"], Float[Tensor, "B H W Dv"], Int[Tensor, "B W"]
]  # keys, values, positions


ALL: Final = slice(None)  # layers


class Window(ABC):
    """The raw window of all layers, sequences and KV heads."""

    @property
    @abstractmethod
    def size(self) -> int:
        """W, tokens per sequence."""

    @property
    @abstractmethod
    def position(self) -> Int[Tensor, "B W"]:
        """Position of each slot's token, or -1."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes outside the pool."""

    @property
    @abstractmethod
    def has_scores(self) -> bool:
        """Whether each token has a score."""

    @property
    @abstractmethod
    def stores(self) -> tuple[TokenStore, ...]:
        """The stores of the slots; empty if the window has separate memory."""

    @property
    def in_pages(self) -> bool:
        """Whether slots are in pages of a pool."""
        return bool(self.stores)

    @abstractmethod
    def keys_of(self, layers: slice) -> Float[Tensor, "n B H W D"]:
        """Return the keys of layers, by slot."""

    @abstractmethod
    def values_of(self, layers: slice) -> Float[Tensor, "n B H W Dv"]:
        """Return the values of layers, by slot."""

    @abstractmethod
    def scores_of(self, layers: slice) -> Float[Tensor, "n B H W"]:
        """Return the scores of layers, by slot.

        Raises:
            ValueError: tokens have no scores.
        """

    @abstractmethod
    def set_scores_of(self, layers: slice, score: Float[Tensor, "n B H W"]) -> None:
        """Set the scores of layers' tokens.

        Raises:
            ValueError: tokens have no scores.
        """

    def accumulate(
        self,
        layers: slice,
        before: Int[Tensor, " B"],
        mass: Float[Tensor, "n B H W"],
        seen: Int[Tensor, "n B H W"],
        running: Running,
    ) -> None:
        """Update the scores of layers' tokens, means over queries or sums, with a decode step.

        Args:
            layers: the layers.
            before: tokens of each sequence before the step; -1: it keeps its scores.
            mass: attention mass of the queries of the step per slot.
            seen: number of queries counted per slot.
            running: the kind of mean or sum.

        Raises:
            ValueError: tokens have no scores.
        """
        old, since = self.scores_of(layers), before[:, None, None]
        place = self.position[:, None].expand_as(old)
        new = running.update(old, place, since, mass, seen)
        self.set_scores_of(layers, new.where(since >= 0, old))

    def keys(self, layer: int) -> Float[Tensor, "B H W D"]:
        """Return a layer's keys, by slot."""
        return self.keys_of(slice(layer, layer + 1))[0]

    def values(self, layer: int) -> Float[Tensor, "B H W Dv"]:
        """Return a layer's values, by slot."""
        return self.values_of(slice(layer, layer + 1))[0]

    @abstractmethod
    def stays(self, position: Int[Tensor, "B S"], total: Int[Tensor, " B"]) -> Bool[Tensor, "B S"]:
        """Return which positions are among the newest `size` of `total` tokens."""

    @abstractmethod
    def put(
        self,
        layers: slice,
        key: Float[Tensor, "n B H L D"],
        value: Float[Tensor, "n B H L Dv"],
        position: Int[Tensor, "B L"],
        total: Int[Tensor, " B"],
        score: Float[Tensor, "n B H L"] | None = None,
    ) -> None:
        """Write the new tokens that stay in the window to their slots."""

    @abstractmethod
    def advance(self, position: Int[Tensor, "B L"], total: Int[Tensor, " B"]) -> None:
        """Record the positions of tokens written by `put`, after all layers."""

    @abstractmethod
    def in_order(self, layer: int) -> InOrder:
        """Return a layer's keys, values and positions, oldest first; empty slots (-1) lead."""

    @abstractmethod
    def exchange(
        self,
        key: Float[Tensor, "N B H 1 D"],
        value: Float[Tensor, "N B H 1 Dv"],
        position: Int[Tensor, "B 1"],
        total: Int[Tensor, " B"],
        score: Float[Tensor, "N B H 1"] | None = None,
        layers: slice = ALL,
    ) -> Left:
        """Write one new token per sequence and return the replaced one (position -1: none).

        A sequence without a new token (position -1) is unchanged. The cost is independent of the
        window size, and the host does not synchronize with the device. Without a score, that of the
        replaced token stays.
        """

    @abstractmethod
    def hold_newest(self, seen: Int[Tensor, " B"]) -> None:
        """Set the positions of the slots after `seen` tokens of each sequence."""

    @abstractmethod
    def select(self, source: Int[Tensor, " B2"]) -> None:
        """Reorder sequences to source[0], source[1], ..."""

    @abstractmethod
    def reorder(self, source: Int[Tensor, " B2"]) -> None:
        """Do the part of `select` outside `stores`."""

    @abstractmethod
    def join(self, other: "Window") -> None:
        """Append another window's sequences, which empties it.

        Raises:
            ValueError: as `expect_join`.
        """

    @abstractmethod
    def expect_join(self, other: "Window") -> None:
        """Raise if a window cannot join.

        Raises:
            ValueError: its type, size, shape or pool differs.
        """

    @abstractmethod
    def adopt(self, sequence: int, other: "Window") -> None:
        """Replace an empty sequence by the only one of another window, in place; it has none then.

        Raises:
            ValueError: as `expect_join`.
        """

    @abstractmethod
    def branch(self, sequence: int, other: "Window") -> None:
        """Let the only sequence of another window have a copy of one, outside `stores`."""

    @abstractmethod
    def clear(self, sequences: Int[Tensor, " n"]) -> None:
        """Do the part of emptying sequences outside `stores`, in place."""

    @abstractmethod
    def forget_tiles(self) -> None:
        """Let the next attention count tiles again: a captured step has changed lengths."""

    @abstractmethod
    def release(self) -> None:
        """Remove all sequences."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return what the slots hold, by name; positions follow from the tokens seen.

        Raises:
            ValueError: slots are in pages of a pool, which may be shared.
        """

    @abstractmethod
    def restore(self, tensors: Mapping[str, Tensor], seen: Int[Tensor, " B"]) -> None:
        """Fill the slots from `tensors` of another window of this shape.

        Args:
            tensors: on the device of the window.
            seen: tokens seen of each sequence.

        Raises:
            ValueError: as `tensors`.
        """


class RingBuffer(Window):
    """Ring buffers of `size` tokens for all layers, sequences and KV heads.

    The token at position p of a sequence is in slot p % size, for every layer and head, so a decode
    step overwrites one slot, and the replaced token moves to the tiers.
    """

    def __init__(self, sequences: int, size: int, kv_heads: int, device: torch.device) -> None:
        """Start with empty slots."""
        self._size, self._kv_heads = size, kv_heads
        self._hold(torch.full((sequences, size), -1, dtype=torch.long, device=device))

    @property
    def size(self) -> int:
        """W, tokens per sequence."""
        return self._size

    @property
    def position(self) -> Int[Tensor, "B W"]:
        """Position of each slot's token, or -1."""
        return self._position

    def _hold(self, position: Int[Tensor, "B W"]) -> None:
        """Set the positions of the slots; a sequence fills its first slots first."""
        self._position = position
        filled = (position >= 0).sum(1, keepdim=True, dtype=torch.int32)
        self._filled = filled.expand(-1, self._kv_heads).contiguous()
        self.forget_tiles()

    def _renew(self) -> None:
        """Count the filled slots after positions have changed in place."""
        self._filled.copy_((self._position >= 0).sum(1, keepdim=True, dtype=torch.int32))
        self.forget_tiles()

    def branch(self, sequence: int, other: Window) -> None:
        """Let the only sequence of another window have the positions of one."""
        assert isinstance(other, RingBuffer), "both are of one policy"
        other._hold(self._position[sequence : sequence + 1].clone())

    def clear(self, sequences: Int[Tensor, " n"]) -> None:
        """Empty the slots of sequences, in place."""
        self._position[sequences] = -1
        self._renew()

    def forget_tiles(self) -> None:
        """Do nothing: the slots have no tiles."""

    def hold_newest(self, seen: Int[Tensor, " B"]) -> None:
        """Set the positions of the slots after `seen` tokens of each sequence."""
        last = seen[:, None] - 1
        slot = torch.arange(self.size, device=seen.device)
        self._hold((last - (last - slot) % self.size).clamp(min=-1))

    @abstractmethod
    def view(self, layers: slice) -> PagedTokens | DenseTokens:
        """Return layers for attention, with the heads of all layers concatenated.

        Valid until the next operation.
        """

    @abstractmethod
    def views(self) -> list[PagedTokens] | None:
        """Return every layer in pages, without tiles; None: values are in keys."""

    @property
    @abstractmethod
    def read_in_place(self) -> tuple[Tensor, ...]:
        """The tensors that `views` and positions are made of; see `TokenStore.read_in_place`."""

    @property
    @abstractmethod
    def dims(self) -> tuple[int, int]:
        """D and Dv."""

    def stays(self, position: Int[Tensor, "B S"], total: Int[Tensor, " B"]) -> Bool[Tensor, "B S"]:
        """Return which positions are among the newest `size` of `total` tokens."""
        return (position >= 0) & (position >= total[:, None] - self.size)

    def advance(self, position: Int[Tensor, "B L"], total: Int[Tensor, " B"]) -> None:
        """Record the positions of tokens written by `put`, after all layers."""
        if position.shape[1] == 1:  # the newest token stays
            slot = position.clamp(min=0) % self.size
            kept = self.position.gather(1, slot)
            self._position.scatter_(1, slot, position.where(position >= 0, kept))
            self._renew()
            return
        slot = torch.where(self.stays(position, total), position % self.size, self.size)
        spill = torch.cat([self.position, self.position.new_zeros(len(position), 1)], 1)
        self._hold(spill.scatter(1, slot, position)[:, : self.size].contiguous())

    def in_order(self, layer: int) -> InOrder:
        """Return a layer's keys, values and positions, oldest first; empty slots (-1) lead."""
        return oldest_first(self.keys(layer), self.values(layer), self.position)


def oldest_first(
    key: Float[Tensor, "B H W D"], value: Float[Tensor, "B H W Dv"], position: Int[Tensor, "B W"]
) -> InOrder:
    """Sort the slots of a layer by position; empty slots (-1) lead."""
    order = position.argsort(-1)
    pick = order[:, None, :, None]
    return (
        key.gather(2, pick.expand(*key.shape)),
        value.gather(2, pick.expand(*value.shape)),
        position.gather(-1, order),
    )


def expect_alike(mine: Window, other: Window) -> None:
    """Raise if a window's type or size differs.

    Raises:
        ValueError: the type or size differs, or both are the same window.
    """
    if type(mine) is not type(other) or mine is other:
        raise ValueError(
            f"a {type(other).__name__} cannot join a {type(mine).__name__}; both must be different "
            "windows of the same type"
        )
    if mine.size != other.size:
        raise ValueError(
            f"a window of {other.size} tokens cannot join one of {mine.size}; make both the same"
        )
