"""Attention of each query to some of the tokens that it sees, such as those an indexer chooses."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_attention.parts import AttentionPart, block_sizes


@dataclass(frozen=True)
class Choice:
    """The tokens that each query attends to, by their positions; the same for all heads.

    Attributes:
        by_position: whether a query attends to the token at a position; one past the last is not
            chosen.
        lost: whether no chosen token of a query is stored for a head, which then attends to every
            token that the query sees.
    """

    by_position: Bool[Tensor, "B L P"]
    lost: Bool[Tensor, "B H L"]

    @classmethod
    def of(
        cls,
        chosen: Bool[Tensor, "B L P"],
        q: Float[Tensor, "B H G L D"],
        position: Int[Tensor, "B L"],
        parts: Sequence[AttentionPart],
    ) -> "Choice":
        """Compare what is chosen with the tokens that are there, without waiting for the device."""
        found = torch.zeros(*q.shape[:2], q.shape[3], dtype=torch.bool, device=q.device)
        every = cls(chosen, found)
        size, tokens = block_sizes(q, q.shape[-1])
        for part in parts:
            for at in part.spans(tokens):
                place = part.position(at)
                for start in range(0, q.shape[3], size):
                    chunk = slice(start, start + size)
                    seen = part.visible(at, position[:, chunk])
                    held = every[chunk]._chosen(place)
                    found[..., chunk] |= (held if seen is None else held & seen).any(-1)
        return cls(chosen, ~found)

    def __getitem__(self, queries: slice) -> "Choice":
        """Return the choice of some queries."""
        return Choice(self.by_position[:, queries], self.lost[..., queries])

    def gathered(self, column: Int[Tensor, "B w"]) -> "Choice":
        """Return the choice of one query per entry of `column`."""
        at = column[..., None].expand(-1, -1, self.by_position.shape[-1])
        heads = column[:, None].expand(-1, self.lost.shape[1], -1)
        return Choice(self.by_position.gather(1, at), self.lost.gather(2, heads))

    def allows(self, place: Int[Tensor, "B _ S"]) -> Bool[Tensor, "B H L S"]:
        """Return which queries attend to the tokens at these positions, if they see them."""
        return self._chosen(place) | self.lost[..., None]

    def among(
        self, seen: Bool[Tensor, "B _ _ S"] | None, place: Int[Tensor, "B _ S"]
    ) -> Bool[Tensor, "B H L S"]:
        """Return which queries attend to tokens, of those that they see; None: they see all."""
        allowed = self.allows(place)
        return allowed if seen is None else allowed & seen

    def _chosen(self, place: Int[Tensor, "B h S"]) -> Bool[Tensor, "B h L S"]:
        queries, positions = self.by_position.shape[1:]
        at = place.long().clamp(0, positions - 1)[:, :, None].expand(-1, -1, queries, -1)
        found = self.by_position[:, None].expand(-1, place.shape[1], -1, -1).gather(3, at)
        return found & (place < positions)[:, :, None]
