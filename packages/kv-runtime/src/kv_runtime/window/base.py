"""The newest tokens of each sequence as rings: what slot a token has, wherever slots lie."""

from abc import ABC, abstractmethod
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_attention import DenseTokens
from kv_paging import TokenStore
from kv_policy import PagedTokens

Left: TypeAlias = tuple[  # what `exchange` pushes out: keys, values, positions, scores
    Float[Tensor, "N B H 1 D"],
    Float[Tensor, "N B H 1 Dv"],
    Int[Tensor, "B 1"],
    Float[Tensor, "N B H 1"] | None,
]
InOrder: TypeAlias = tuple[
    Float[Tensor, "B H W D"], Float[Tensor, "B H W Dv"], Int[Tensor, "B W"]
]  # keys, values, positions


class Window(ABC):
    """The raw window of all layers, sequences and KV heads."""

    @property
    @abstractmethod
    def size(self) -> int:
        """W, tokens of each sequence."""

    @property
    @abstractmethod
    def position(self) -> Int[Tensor, "B W"]:
        """Position of each slot's token, or -1."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held outside the pool."""

    @property
    @abstractmethod
    def has_scores(self) -> bool:
        """Whether each token carries a score."""

    @property
    @abstractmethod
    def stores(self) -> tuple[TokenStore, ...]:
        """Where slots lie in pages of a pool; none where the window has memory of its own."""

    @property
    def in_pages(self) -> bool:
        """Whether slots lie in pages of a pool."""
        return bool(self.stores)

    @abstractmethod
    def keys_of(self, layers: slice) -> Float[Tensor, "n B H W D"]:
        """Keys of some layers, by slot."""

    @abstractmethod
    def values_of(self, layers: slice) -> Float[Tensor, "n B H W Dv"]:
        """Values of some layers, by slot."""

    @abstractmethod
    def scores_of(self, layers: slice) -> Float[Tensor, "n B H W"]:
        """Scores of some layers, by slot.

        Raises:
            ValueError: tokens carry none.
        """

    @abstractmethod
    def set_scores_of(self, layers: slice, score: Float[Tensor, "n B H W"]) -> None:
        """Give the tokens of some layers new scores.

        Raises:
            ValueError: tokens carry none.
        """

    def keys(self, layer: int) -> Float[Tensor, "B H W D"]:
        """A layer's keys, by slot."""
        return self.keys_of(slice(layer, layer + 1))[0]

    def values(self, layer: int) -> Float[Tensor, "B H W Dv"]:
        """A layer's values, by slot."""
        return self.values_of(slice(layer, layer + 1))[0]

    @abstractmethod
    def stays(self, position: Int[Tensor, "B S"], total: Int[Tensor, " B"]) -> Bool[Tensor, "B S"]:
        """Which positions are among the newest `size` of `total` tokens."""

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
        """Write the fresh tokens that stay into their slots."""

    @abstractmethod
    def advance(self, position: Int[Tensor, "B L"], total: Int[Tensor, " B"]) -> None:
        """Note the positions of what `put` wrote, once all layers have written."""

    @abstractmethod
    def in_order(self, layer: int) -> InOrder:
        """One layer's keys, values and positions, oldest first; empty slots (-1) lead."""

    @abstractmethod
    def exchange(
        self,
        key: Float[Tensor, "N B H 1 D"],
        value: Float[Tensor, "N B H 1 Dv"],
        position: Int[Tensor, "B 1"],
        total: Int[Tensor, " B"],
        score: Float[Tensor, "N B H 1"] | None = None,
    ) -> Left:
        """Put one fresh token per sequence and give the one it pushes out (position -1: none).

        A sequence that brings none (position -1) keeps what it has. Work does not grow with the
        window, and nothing waits for the device.
        """

    @abstractmethod
    def select(self, source: Int[Tensor, " B2"]) -> None:
        """Sequences become source[0], source[1], ..."""

    @abstractmethod
    def reorder(self, source: Int[Tensor, " B2"]) -> None:
        """Do the part of `select` that is not about `stores`."""

    @abstractmethod
    def join(self, other: "Window") -> None:
        """Let another window's sequences come after these; it has none then.

        Raises:
            ValueError: what `expect_join` refuses.
        """

    @abstractmethod
    def expect_join(self, other: "Window") -> None:
        """Refuse a window that cannot join.

        Raises:
            ValueError: it is of another sort, size, shape or pool.
        """

    @abstractmethod
    def release(self) -> None:
        """Let all sequences go."""


class RingBuffer(Window):
    """Rings of `size` tokens for all layers, sequences and KV heads.

    The token at position p of a sequence lies in slot p % size, the same for every layer and head,
    so a decoding step overwrites one slot and the token that lay there leaves for the tiers.
    """

    def __init__(self, sequences: int, size: int, device: torch.device) -> None:
        """Know that all slots are empty."""
        self._size = size
        self._hold(torch.full((sequences, size), -1, dtype=torch.long, device=device))

    @property
    def size(self) -> int:
        """W, tokens of each sequence."""
        return self._size

    @property
    def position(self) -> Int[Tensor, "B W"]:
        """Position of each slot's token, or -1."""
        return self._position

    def _hold(self, position: Int[Tensor, "B W"]) -> None:
        """Know whose tokens stand in the slots; a sequence's first ones are full."""
        self._position = position
        self._filled = (position >= 0).sum(1).int()

    @abstractmethod
    def view(self, layers: slice) -> PagedTokens | DenseTokens:
        """Give some layers as attention reads them, the heads of all side by side.

        Good until the next operation.
        """

    @property
    @abstractmethod
    def dims(self) -> tuple[int, int]:
        """D and Dv."""

    def stays(self, position: Int[Tensor, "B S"], total: Int[Tensor, " B"]) -> Bool[Tensor, "B S"]:
        """Which positions are among the newest `size` of `total` tokens."""
        return (position >= 0) & (position >= total[:, None] - self.size)

    def advance(self, position: Int[Tensor, "B L"], total: Int[Tensor, " B"]) -> None:
        """Note the positions of what `put` wrote, once all layers have written."""
        slot = torch.where(self.stays(position, total), position % self.size, self.size)
        spill = torch.cat([self.position, self.position.new_zeros(len(position), 1)], 1)
        self._hold(spill.scatter(1, slot, position)[:, : self.size].contiguous())

    def in_order(self, layer: int) -> InOrder:
        """One layer's keys, values and positions, oldest first; empty slots (-1) lead."""
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
    """Refuse a window of another sort or size.

    Raises:
        ValueError: it is.
    """
    if type(mine) is not type(other) or mine is other:
        raise ValueError(
            f"a {type(other).__name__} cannot join a {type(mine).__name__}; both must be of one "
            "sort, and two"
        )
    if mine.size != other.size:
        raise ValueError(
            f"a window of {other.size} tokens cannot join one of {mine.size}; make both the same"
        )
