"""The raw window: the newest tokens of each sequence, in the model's dtype, in a ring buffer."""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from kv_attention import DenseTokens
from kv_paging import TokenStore
from kv_policy import CacheShape, PagedTokens, PageLayout, Raw, tier_formats
from kv_runtime.window.base import ALL, Left, RingBuffer, Window, expect_alike


class RawWindow(RingBuffer):
    """Ring buffers in separate memory; empty slots are zeros.

    The slots of a layer, sequence and head are a page of raw tokens, so that attention may read
    them beside pages of a pool, and update their scores.
    """

    def __init__(
        self, shape: CacheShape, sequences: int, size: int, device: torch.device, scores: bool
    ) -> None:
        """Create empty ring buffers; `scores`: whether each token has a float32 score."""
        super().__init__(sequences, size, shape.kv_heads, device)
        slots = size + (size % 2 if scores else 0)  # scores begin at a multiple of their 4 bytes
        self._layout = PageLayout.sized(tier_formats(Raw(), shape)[0], slots, scores)
        self._shape = shape
        lead = shape.layers, sequences, shape.kv_heads, self._layout.nbytes
        self._bind(torch.zeros(lead, dtype=torch.uint8, device=device))

    def _bind(self, pages: UInt8[Tensor, "N B H nbytes"]) -> None:
        """Set the memory of all slots, of which keys, values and scores are views."""

        def part(offset: int, dim: int, dtype: torch.dtype) -> Float[Tensor, "N B H W D"]:
            nbytes = self._layout.tokens * dim * dtype.itemsize
            numbers = pages[..., offset : offset + nbytes].view(dtype)
            slots: Tensor = numbers.unflatten(-1, (self._layout.tokens, dim))
            return slots[..., : self.size, :]

        shape, layout = self._shape, self._layout
        self._pages = pages
        self.key = part(layout.segments[0][0], shape.key_dim, shape.dtype)
        self._value = (  # None: a value is the first dimensions of its key
            None
            if shape.value_in_key
            else part(layout.segments[1][0], shape.value_dim, shape.dtype)
        )
        scores = layout.scores
        self.score = part(layout.score_offset, 1, torch.float32)[..., 0] if scores else None

    @property
    def value(self) -> Float[Tensor, "N B H W Dv"]:
        """Values by slot."""
        return self.key[..., : self.dims[1]] if self._value is None else self._value

    @property
    def nbytes(self) -> int:
        """Bytes of the window."""
        return self._pages.numel() + self.position.numel() * self.position.itemsize

    @property
    def dims(self) -> tuple[int, int]:
        """D and Dv."""
        return self._shape.key_dim, self._shape.value_dim

    @property
    def has_scores(self) -> bool:
        """Whether each token has a score."""
        return self.score is not None

    @property
    def stores(self) -> tuple[TokenStore, ...]:
        """Empty: slots are not in pages."""
        return ()

    def view(self, layers: slice) -> DenseTokens:
        """Return layers for attention, with the heads of all layers concatenated."""
        key, value = (x[layers].movedim(0, 1).flatten(1, 2) for x in (self.key, self.value))
        return DenseTokens(key, value, self.position, full=False)

    def views(self) -> list[PagedTokens] | None:
        """Return every layer in pages, without tiles; None: values are in keys."""
        if self._value is None:
            return None
        *lead, nbytes = self._pages.shape
        count, data = self._pages.shape[:3].numel(), self._pages.view(-1, nbytes)
        table = torch.arange(count, dtype=torch.int32, device=data.device).view(*lead, 1)
        longest = self.size
        return [
            PagedTokens(data, each, self._filled, self._layout, longest=longest) for each in table
        ]

    @property
    def read_in_place(self) -> tuple[Tensor, ...]:
        """The tensors that `views` and positions are made of."""
        return self._pages, self._filled, self.position

    def keys_of(self, layers: slice) -> Float[Tensor, "n B H W D"]:
        """Return the keys of layers, by slot."""
        return self.key[layers]

    def values_of(self, layers: slice) -> Float[Tensor, "n B H W Dv"]:
        """Return the values of layers, by slot."""
        return self.value[layers]

    def scores_of(self, layers: slice) -> Float[Tensor, "n B H W"]:
        """Return the scores of layers, by slot.

        Raises:
            ValueError: tokens have no scores.
        """
        if self.score is None:
            raise ValueError("tokens of this window have no scores; create it with scores=True")
        return self.score[layers]

    def set_scores_of(self, layers: slice, score: Float[Tensor, "n B H W"]) -> None:
        """Set the scores of layers' tokens.

        Raises:
            ValueError: tokens have no scores.
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
        """Write the new tokens that stay in the window to their slots."""
        slot = torch.where(self.stays(position, total), position % self.size, self.size)
        _write(self.key[layers], key, slot)
        if self._value is not None:
            _write(self._value[layers], value, slot)
        if self.score is not None and score is not None:
            _write(self.score[layers].unsqueeze(-1), score.unsqueeze(-1), slot)

    def exchange(
        self,
        key: Float[Tensor, "N B H 1 D"],
        value: Float[Tensor, "N B H 1 Dv"],
        position: Int[Tensor, "B 1"],
        total: Int[Tensor, " B"],
        score: Float[Tensor, "N B H 1"] | None = None,
        layers: slice = ALL,
    ) -> Left:
        """Write one new token per sequence and return the replaced one, as `Window.exchange`."""
        real = position >= 0
        slot = position[:, 0].clamp(min=0) % self.size
        row = torch.arange(len(slot), device=slot.device)
        keys, values = self.key[layers], None if self._value is None else self._value[layers]
        out_key = keys[:, row, :, slot]  # B N H D
        out_value = out_key[..., : self.dims[1]] if values is None else values[:, row, :, slot]
        left = torch.where(real[:, 0], self.position[row, slot], -1)
        fresh = real[:, :, None, None]
        keys[:, row, :, slot] = torch.where(fresh, key[..., 0, :].transpose(0, 1), out_key)
        if values is not None:
            values[:, row, :, slot] = torch.where(
                fresh, value[..., 0, :].transpose(0, 1), out_value
            )
        out_score = None
        if self.score is not None and score is not None:
            scores = self.score[layers]
            out_score = scores[:, row, :, slot]
            scores[:, row, :, slot] = torch.where(
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
        """Reorder sequences to source[0], source[1], ..."""
        self.reorder(source)

    def branch(self, sequence: int, other: Window) -> None:
        """Let the only sequence of another window have a copy of one."""
        super().branch(sequence, other)
        assert isinstance(other, RawWindow), "both are of one policy"
        other._bind(self._pages[:, sequence : sequence + 1].clone())

    def reorder(self, source: Int[Tensor, " B2"]) -> None:
        """Do all of `select`, as there are no stores."""
        self._bind(self._pages[:, source])
        self._hold(self.position[source])

    def join(self, other: Window) -> None:
        """Append another window's sequences, which empties it.

        Both windows are copied.

        Raises:
            ValueError: its type, size or shape differs; nothing has changed.
        """
        self.expect_join(other)
        assert isinstance(other, RawWindow)  # checked by expect_join
        self._bind(torch.cat((self._pages, other._pages), 1))
        self._hold(torch.cat((self.position, other.position)))
        other.release()

    def adopt(self, sequence: int, other: Window) -> None:
        """Replace an empty sequence by the only one of another window, as `Window.adopt`.

        Raises:
            ValueError: its type, size or shape differs; nothing has changed.
        """
        self.expect_join(other)
        assert isinstance(other, RawWindow)  # checked by expect_join
        self._pages[:, sequence] = other._pages[:, 0]
        self._position[sequence] = other._position[0]
        self._renew()
        other.release()

    def expect_join(self, other: Window) -> None:
        """Raise if `join` would.

        Raises:
            ValueError: its type, size or shape differs.
        """
        expect_alike(self, other)
        assert isinstance(other, RawWindow)  # checked by expect_join
        mine, theirs = self._sort, other._sort
        if mine != theirs:
            raise ValueError(f"a window of {theirs} cannot join one of {mine}; make both the same")

    def release(self) -> None:
        """Remove all sequences."""
        self.reorder(torch.zeros(0, dtype=torch.long, device=self.position.device))

    @property
    def _sort(self) -> str:
        layers, _, heads = self.key.shape[:3]
        scores = "scores" if self.has_scores else "no scores"
        key, value = self.dims
        inside = " (values in keys)" if self._value is None else ""
        return (
            f"{layers} layers, {heads} heads, {self.key.dtype} vectors of {key} and {value} "
            f"dimensions{inside} and {scores}"
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return keys, values and scores of all slots."""
        found = {"key": self.key, "value": self._value, "score": self.score}
        return {name: x for name, x in found.items() if x is not None}

    def restore(self, tensors: Mapping[str, Tensor], seen: Int[Tensor, " B"]) -> None:
        """Fill the slots from `tensors` of another window of this shape."""
        for name, x in self.tensors().items():
            x.copy_(tensors[name])
        self.hold_newest(seen)


def _write(
    ring: Tensor,  # n B H W D
    fresh: Tensor,  # n B H L D
    slot: Int[Tensor, "B L"],
) -> None:
    """Scatter along the ring buffer; slot W is discarded."""
    n, b, h, width, dim = ring.shape
    spill = torch.cat([ring, ring.new_zeros(n, b, h, 1, dim)], 3)
    index = slot[None, :, None, :, None].expand(n, b, h, slot.shape[1], dim)
    spill.scatter_(3, index, fresh.to(ring.dtype))
    ring.copy_(spill[:, :, :, :width])
