"""The raw window: the newest tokens of each sequence, in the model's dtype, as a ring."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_attention import DenseTokens
from kv_paging import TokenStore
from kv_policy import CacheShape
from kv_runtime.window.base import Left, RingBuffer, Window, expect_alike


class RawWindow(RingBuffer):
    """Rings in memory of their own; slots without a token are zeros."""

    def __init__(
        self, shape: CacheShape, sequences: int, size: int, device: torch.device, scores: bool
    ) -> None:
        """Make empty rings; `scores` says whether each token carries a float32 score."""
        super().__init__(sequences, size, device)
        lead = (shape.layers, sequences, shape.kv_heads, size)
        self.key = torch.zeros(*lead, shape.key_dim, dtype=shape.dtype, device=device)
        self.value = torch.zeros(*lead, shape.value_dim, dtype=shape.dtype, device=device)
        self.score = torch.zeros(lead, device=device) if scores else None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        held = [self.key, self.value, self.position]
        if self.score is not None:
            held.append(self.score)
        return sum(t.numel() * t.element_size() for t in held)

    @property
    def dims(self) -> tuple[int, int]:
        """D and Dv."""
        return self.key.shape[-1], self.value.shape[-1]

    @property
    def has_scores(self) -> bool:
        """Whether each token carries a score."""
        return self.score is not None

    @property
    def stores(self) -> tuple[TokenStore, ...]:
        """Nothing lies in pages."""
        return ()

    def view(self, layers: slice) -> DenseTokens:
        """Give some layers as attention reads them, the heads of all side by side."""
        key, value = (x[layers].movedim(0, 1).flatten(1, 2) for x in (self.key, self.value))
        return DenseTokens(key, value, self.position, full=False)

    def keys_of(self, layers: slice) -> Float[Tensor, "n B H W D"]:
        """Keys of some layers, by slot."""
        return self.key[layers]

    def values_of(self, layers: slice) -> Float[Tensor, "n B H W Dv"]:
        """Values of some layers, by slot."""
        return self.value[layers]

    def scores_of(self, layers: slice) -> Float[Tensor, "n B H W"]:
        """Scores of some layers, by slot.

        Raises:
            ValueError: tokens carry none.
        """
        if self.score is None:
            raise ValueError("tokens of this window carry no scores; make it with scores=True")
        return self.score[layers]

    def set_scores_of(self, layers: slice, score: Float[Tensor, "n B H W"]) -> None:
        """Give the tokens of some layers new scores.

        Raises:
            ValueError: tokens carry none.
        """
        self.scores_of(layers).copy_(score)

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

    def exchange(
        self,
        key: Float[Tensor, "N B H 1 D"],
        value: Float[Tensor, "N B H 1 Dv"],
        position: Int[Tensor, "B 1"],
        total: Int[Tensor, " B"],
        score: Float[Tensor, "N B H 1"] | None = None,
    ) -> Left:
        """Put one fresh token per sequence and return the evicted one, as `Window.exchange`."""
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
        self.reorder(source)

    def reorder(self, source: Int[Tensor, " B2"]) -> None:
        """Do what `select` does: all of it is here."""
        self.key, self.value = self.key[:, source], self.value[:, source]
        self._hold(self.position[source])
        if self.score is not None:
            self.score = self.score[:, source]

    def join(self, other: Window) -> None:
        """Let another window's sequences come after these; it has none then.

        Both windows are copied.

        Raises:
            ValueError: it is of another sort, size or shape; nothing has changed.
        """
        self.expect_join(other)
        assert isinstance(other, RawWindow)  # it was refused otherwise
        self.key = torch.cat((self.key, other.key), 1)
        self.value = torch.cat((self.value, other.value), 1)
        self._hold(torch.cat((self.position, other.position)))
        if self.score is not None and other.score is not None:
            self.score = torch.cat((self.score, other.score), 1)
        other.release()

    def expect_join(self, other: Window) -> None:
        """Refuse what `join` refuses.

        Raises:
            ValueError: it is of another sort, size or shape.
        """
        expect_alike(self, other)
        assert isinstance(other, RawWindow)  # it was refused otherwise
        mine, theirs = self._sort, other._sort
        if mine != theirs:
            raise ValueError(f"a window of {theirs} cannot join one of {mine}; make both the same")

    def release(self) -> None:
        """Let all sequences go."""
        self.reorder(torch.zeros(0, dtype=torch.long, device=self.position.device))

    @property
    def _sort(self) -> str:
        layers, _, heads = self.key.shape[:3]
        scores = "scores" if self.has_scores else "no scores"
        key, value = self.dims
        return (
            f"{layers} layers, {heads} heads, {self.key.dtype} vectors of {key} and {value} "
            f"dimensions and {scores}"
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
