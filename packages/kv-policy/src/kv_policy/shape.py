"""The fixed sizes of a model's KV cache."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of a head: pairs of dimensions, each rotated by its own frequency.

    At an angle a = position * frequency, pair (i, j) of a vector x becomes cos(a) x_i - sin(a) x_j
    and cos(a) x_j + sin(a) x_i. Dimensions of no pair stay as they are; without any pair a layer
    has no positions (NoPE).
    """

    frequencies: tuple[float, ...]  # radians a position, of each pair
    pairs: tuple[tuple[int, int], ...] | None = None  # None: i and i + D / 2, halves of a head

    def __post_init__(self) -> None:
        """Check that each pair has a frequency and that no dimension is in two pairs.

        Raises:
            ValueError: frequencies and pairs do not match.
        """
        if self.pairs is None:
            return
        dims = [dim for pair in self.pairs for dim in pair]
        if len(self.pairs) != len(self.frequencies) or len(dims) != len(set(dims)):
            raise ValueError(
                f"{len(self.frequencies)} frequencies and the pairs {self.pairs} do not fit "
                "together; use one frequency per pair, and each dimension in at most one pair"
            )

    def turned(
        self, x: Float[Tensor, "*S D"], position: Int[Tensor, "*P"]
    ) -> Float[Tensor, "*T D"]:
        """Rotate vectors by the given positions; S and P broadcast to T."""
        rate, partner = _by_dimension(self, x.shape[-1], x.device)
        angle = position[..., None] * rate
        return x * angle.cos() - x[..., partner] * angle.sin()

    def pair_norms(self, x: Float[Tensor, "*S D"]) -> Float[Tensor, "*S D"]:
        """Return, per dimension, the norm of the pair it is in, which no rotation changes.

        A dimension of no pair counts as a pair with itself.
        """
        _, partner = _by_dimension(self, x.shape[-1], x.device)
        return torch.hypot(x, x[..., partner])

    def mean_turn(self, position: Int[Tensor, "*B T"], dim: int) -> Float[Tensor, "*B D D"]:
        """Return the mean of the rotation matrices of `dim` dimensions over the positions."""
        rate, partner = _by_dimension(self, dim, position.device)
        angle = position[..., None] * rate
        matrix = angle.cos().mean(-2).diag_embed()
        sine = angle.sin().mean(-2)[..., None]
        return matrix.scatter_add(-1, partner[:, None].expand_as(sine), -sine)


@lru_cache(maxsize=64)
def _by_dimension(
    rope: Rope, dim: int, device: torch.device
) -> tuple[Float[Tensor, " D"], Int[Tensor, " D"]]:
    """Return the rotation rate towards minus its partner, and the partner, per dimension."""
    half = dim // 2
    pairs = rope.pairs
    if pairs is None:
        pairs = tuple((i, i + half) for i in range(len(rope.frequencies)))
    rate, partner = [0.0] * dim, list(range(dim))
    for (i, j), frequency in zip(pairs, rope.frequencies, strict=True):
        rate[i], rate[j] = frequency, -frequency
        partner[i], partner[j] = j, i
    with torch.inference_mode(False):  # cached tensors outlive the caller
        # vLLM loads models under another default dtype, which is too coarse for angles.
        found = torch.tensor(rate, dtype=torch.float32, device=device)
        return found, torch.tensor(partner, device=device)


@dataclass(frozen=True, slots=True)
class Ropes:
    """Rotary embeddings that differ between layers."""

    each: tuple[Rope, ...]  # one per layer

    def turned(
        self, x: Float[Tensor, "B *S D"], position: Int[Tensor, "B *P L"], layer: Int[Tensor, " B"]
    ) -> Float[Tensor, "B *T D"]:
        """Rotate the vectors of layers by the given positions; S and P broadcast to T."""
        rate, partner = _by_layer(self, x.shape[-1], x.device)
        lead = (len(layer), *(1,) * (x.ndim - 2), x.shape[-1])
        angle = position[..., None] * rate[layer].view(lead)
        other = x.gather(-1, partner[layer].view(lead).expand_as(x))
        return x * angle.cos() - other * angle.sin()

    def pair_norms(
        self, x: Float[Tensor, "B *S D"], layer: Int[Tensor, " B"]
    ) -> Float[Tensor, "B *S D"]:
        """Return the norms of pairs of dimensions of layers' vectors; see `Rope.pair_norms`."""
        _, partner = _by_layer(self, x.shape[-1], x.device)
        lead = (len(layer), *(1,) * (x.ndim - 2), x.shape[-1])
        return torch.hypot(x, x.gather(-1, partner[layer].view(lead).expand_as(x)))


@lru_cache(maxsize=8)
def _by_layer(
    ropes: Ropes, dim: int, device: torch.device
) -> tuple[Float[Tensor, "N D"], Int[Tensor, "N D"]]:
    """Return rates and partners as `_by_dimension`, for all layers."""
    each = [_by_dimension(rope, dim, device) for rope in ropes.each]
    with torch.inference_mode(False):
        return torch.stack([rate for rate, _ in each]), torch.stack([other for _, other in each])


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Shape of a model's cache on one device: all of its KV heads or a tensor-parallel shard.

    `kv_heads` counts the heads on this device; under tensor parallelism `first_head` is the index
    of the first of them in a layer, so that per-head data can be cut to the shard.
    """

    layers: int  # N
    kv_heads: int  # H, on this device
    group: int  # G, query heads per KV head
    key_dim: int
    value_dim: int
    dtype: torch.dtype = torch.bfloat16
    first_head: int = 0
    rope: Rope | Ropes | None = None  # of all layers, or per layer; None: unknown

    def __post_init__(self) -> None:
        """Check that every size is positive."""
        for name in ("layers", "kv_heads", "group", "key_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a cache shape needs at least 1")
        if self.first_head < 0:
            raise ValueError(f"first_head is {self.first_head}; it must be 0 or more")
        if isinstance(self.rope, Ropes) and len(self.rope.each) != self.layers:
            raise ValueError(
                f"{len(self.rope.each)} rotary embeddings are given for {self.layers} layers; use "
                "one per layer, or one for all"
            )

    def rope_of(self, layer: int) -> Rope | None:
        """Return the rotary embedding of a layer; None: unknown."""
        return self.rope.each[layer] if isinstance(self.rope, Ropes) else self.rope

    def turned(
        self, x: Float[Tensor, "B *S D"], position: Int[Tensor, "B *P L"], layer: Int[Tensor, " B"]
    ) -> Float[Tensor, "B *T D"]:
        """Rotate the vectors of layers by the given positions; S and P broadcast to T.

        Raises:
            ValueError: the rotary embedding is unknown.
        """
        rope = self._known_rope()
        if isinstance(rope, Ropes):
            return rope.turned(x, position, layer)
        return rope.turned(x, position)

    def pair_norms(
        self, x: Float[Tensor, "B *S D"], layer: Int[Tensor, " B"]
    ) -> Float[Tensor, "B *S D"]:
        """Return the norms of pairs of dimensions of layers' vectors; see `Rope.pair_norms`.

        Raises:
            ValueError: the rotary embedding is unknown.
        """
        rope = self._known_rope()
        return rope.pair_norms(x, layer) if isinstance(rope, Ropes) else rope.pair_norms(x)

    def _known_rope(self) -> Rope | Ropes:
        if self.rope is None:
            raise ValueError("vectors cannot be rotated, as the rotary embedding is unknown")
        return self.rope

    @property
    def token_bytes(self) -> int:
        """Bytes of one uncompressed token over all layers and KV heads."""
        vector = (self.key_dim + self.value_dim) * self.dtype.itemsize
        return self.layers * self.kv_heads * vector
