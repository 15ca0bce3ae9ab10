"""The raw window: the newest tokens of each sequence, in the model's dtype, as a ring."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_policy import CacheShape


class RawWindow:
    """Rings of `size` tokens for all layers, sequences and KV heads.

    The token at position p of a sequence lies in slot p % size, the same for every layer and head,
    so a decoding step overwrites one slot and the token that lay there leaves for the tiers.
    """

    def __init__(
        self, shape: CacheShape, sequences: int, size: int, device: torch.device, scores: bool
    ) -> None:
        """Make empty rings; `scores` says whether each token carries a float32 score."""
        lead = (shape.layers, sequences, shape.kv_heads, size)
        self.size = size
        self.key = torch.zeros(*lead, shape.key_dim, dtype=shape.dtype, device=device)
        self.value = torch.zeros(*lead, shape.value_dim, dtype=shape.dtype, device=device)
        self.score = torch.zeros(lead, device=device) if scores else None
        self.position = torch.full((sequences, size), -1, dtype=torch.long, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        held = [self.key, self.value, self.position]
        if self.score is not None:
            held.append(self.score)
        return sum(t.numel() * t.element_size() for t in held)

    @property
    def has_scores(self) -> bool:
        """Whether each token carries a score."""
        return self.score is not None

    def keys(self, layer: int) -> Float[Tensor, "B H W D"]:
        """A layer's keys, by slot."""
        return self.key[layer]

    def values(self, layer: int) -> Float[Tensor, "B H W Dv"]:
        """A layer's values, by slot."""
        return self.value[layer]

    def scores(self, layer: int) -> Float[Tensor, "B H W"]:
        """A layer's scores, by slot.

        Raises:
            ValueError: tokens carry none.
        """
        if self.score is None:
            raise ValueError("tokens of this window carry no scores; make it with scores=True")
        return self.score[layer]

    def set_scores(self, layer: int, score: Float[Tensor, "B H W"]) -> None:
        """Give a layer's tokens new scores."""
        self.scores(layer).copy_(score)

    def stays(self, position: Int[Tensor, "B S"], total: Int[Tensor, " B"]) -> Bool[Tensor, "B S"]:
        """Which positions are among the newest `size` of `total` tokens."""
        return (position >= 0) & (position >= total[:, None] - self.size)

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
        slot = torch.where(self.stays(position, total), position % self.size, self.size)
        _write(self.key[layers], key, slot)
        _write(self.value[layers], value, slot)
        if self.score is not None and score is not None:
            _write(self.score[layers].unsqueeze(-1), score.unsqueeze(-1), slot)

    def advance(self, position: Int[Tensor, "B L"], total: Int[Tensor, " B"]) -> None:
        """Note the positions of what `put` wrote, once all layers have written."""
        slot = torch.where(self.stays(position, total), position % self.size, self.size)
        _write(self.position[None, :, None, :, None], position[None, :, None, :, None], slot)

    def in_order(
        self, layer: int
    ) -> tuple[Float[Tensor, "B H W D"], Float[Tensor, "B H W Dv"], Int[Tensor, "B W"]]:
        """One layer's keys, values and positions, oldest first; empty slots (-1) lead."""
        return oldest_first(self.key[layer], self.value[layer], self.position)

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
        """Put one fresh token per sequence and give the one it pushes out (position -1: none).

        A sequence that brings none (position -1) keeps what it has. Work does not grow with the
        window, and nothing waits for the device.
        """
        real = position >= 0
        slot = position[:, 0].clamp(min=0) % self.size
        row = torch.arange(len(slot), device=slot.device)
        out_key, out_value = self.key[:, row, :, slot], self.value[:, row, :, slot]  # B N H D
        left = torch.where(real[:, 0], self.position[row, slot], -1)
        fresh = real[:, :, None, None]
        self.key[:, row, :, slot] = torch.where(fresh, key[..., 0, :].transpose(0, 1), out_key)
        self.value[:, row, :, slot] = torch.where(
            fresh, value[..., 0, :].transpose(0, 1), out_value
        )
        out_score = None
        if self.score is not None and score is not None:
            out_score = self.score[:, row, :, slot]
            self.score[:, row, :, slot] = torch.where(
                fresh[..., 0], score[..., 0].transpose(0, 1), out_score
            )
            out_score = out_score.transpose(0, 1)[..., None]
        return (
            out_key.transpose(0, 1)[..., None, :],
            out_value.transpose(0, 1)[..., None, :],
            left[:, None],
            out_score,
        )

    def select(self, source: Int[Tensor, " B2"]) -> None:
        """Sequences become source[0], source[1], ..."""
        self.key, self.value = self.key[:, source], self.value[:, source]
        self.position = self.position[source]
        if self.score is not None:
            self.score = self.score[:, source]


def oldest_first(
    key: Float[Tensor, "B H W D"], value: Float[Tensor, "B H W Dv"], position: Int[Tensor, "B W"]
) -> tuple[Float[Tensor, "B H W D"], Float[Tensor, "B H W Dv"], Int[Tensor, "B W"]]:
    """Sort the slots of a layer by position; empty slots (-1) lead."""
    order = position.argsort(-1)
    pick = order[:, None, :, None]
    return (
        key.gather(2, pick.expand(*key.shape)),
        value.gather(2, pick.expand(*value.shape)),
        position.gather(-1, order),
    )


def _write(
    ring: Tensor,  # n B H W D
    fresh: Tensor,  # n B H L D
    slot: Int[Tensor, "B L"],
) -> None:
    """Scatter along the ring; slot W is thrown away."""
    n, b, h, width, dim = ring.shape
    spill = torch.cat([ring, ring.new_zeros(n, b, h, 1, dim)], 3)
    index = slot[None, :, None, :, None].expand(n, b, h, slot.shape[1], dim)
    spill.scatter_(3, index, fresh.to(ring.dtype))
    ring.copy_(spill[:, :, :, :width])
