"""The fixed sizes of a model's KV cache."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad


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

    def pairs_of(self, dim: int) -> tuple[tuple[int, int], ...]:
        """Return the pairs of a head of `dim` dimensions, one for each frequency."""
        if self.pairs is not None:
            return self.pairs
        return tuple((i, i + dim // 2) for i in range(len(self.frequencies)))

    def turned(
        self, x: Float[Tensor, "*S D"], position: Int[Tensor, "*P"]
    ) -> Float[Tensor, "*T D"]:
        """Rotate vectors by the given positions; S and P broadcast to T."""
        turn = _turn(self, x.shape[-1], x.device)
        # Angles of pairs, not of dimensions: half as many cosines and sines.
        angle = position[..., None] * turn.frequency
        if turn.halves:  # the usual pairs, without copies by index
            (first, second), angle = x.chunk(2, -1), angle[..., :-1]
            cosine, sine = angle.cos(), angle.sin()
            halves = first * cosine - second * sine, second * cosine + first * sine
            return torch.cat(halves, -1)
        cosine, sine = angle.cos()[..., turn.pair], angle.sin()[..., turn.pair] * turn.sign
        return x * cosine - x[..., turn.partner] * sine

    def pair_norms(self, x: Float[Tensor, "*S D"]) -> Float[Tensor, "*S D"]:
        """Return, per dimension, the norm of the pair it is in, which no rotation changes.

        A dimension of no pair counts as a pair with itself.
        """
        square, turn = x.square(), _turn(self, x.shape[-1], x.device)
        if turn.halves:
            norm = torch.add(*square.chunk(2, -1)).sqrt()
            return torch.cat((norm, norm), -1)
        return (square + square[..., turn.partner]).sqrt()

    def mean_turn(self, position: Int[Tensor, "*B T"], dim: int) -> Float[Tensor, "*B D D"]:
        """Return the mean of the rotation matrices of `dim` dimensions over the positions."""
        turn = _turn(self, dim, position.device)
        angle = position[..., None] * turn.frequency
        cosine, sine = angle.cos().mean(-2)[..., turn.pair], angle.sin().mean(-2)[..., turn.pair]
        sine = (sine * turn.sign)[..., None]
        return cosine.diag_embed().scatter_add(-1, turn.partner[:, None].expand_as(sine), -sine)


@dataclass(frozen=True, slots=True)
class _Turn:
    """What each dimension of a vector rotates by."""

    frequency: Float[Tensor, "*N F"]  # of each pair, and 0
    pair: Int[Tensor, "*N D"]  # index into them
    sign: Float[Tensor, "*N D"]  # of the rotation away from the partner
    partner: Int[Tensor, "*N D"]
    halves: bool = False  # whether all pairs are i and i + D / 2, in order


@lru_cache(maxsize=64)
def _turn(rope: Rope, dim: int, device: torch.device) -> _Turn:
    half, none, pairs = dim // 2, len(rope.frequencies), rope.pairs_of(dim)
    pair, sign, partner = [none] * dim, [0.0] * dim, list(range(dim))
    for index, (i, j) in enumerate(pairs):
        pair[i], pair[j] = index, index
        sign[i], sign[j] = 1.0, -1.0
        partner[i], partner[j] = j, i
    with torch.inference_mode(False):  # cached tensors outlive the caller
        # vLLM loads models under another default dtype, which is too coarse for angles.
        frequency = torch.tensor([*rope.frequencies, 0.0], dtype=torch.float32, device=device)
        signs = torch.tensor(sign, dtype=torch.float32, device=device)
        return _Turn(
            frequency,
            torch.tensor(pair, device=device),
            signs,
            torch.tensor(partner, device=device),
            halves=[*pairs] == [(i, i + half) for i in range(dim - half)],
        )


@dataclass(frozen=True, slots=True)
class Ropes:
    """Rotary embeddings that differ between layers."""

    each: tuple[Rope, ...]  # one per layer

    def turned(
        self, x: Float[Tensor, "B *S D"], position: Int[Tensor, "B *P L"], layer: Int[Tensor, " B"]
    ) -> Float[Tensor, "B *T D"]:
        """Rotate the vectors of layers by the given positions; S and P broadcast to T."""
        turn = _turns(self, x.shape[-1], x.device)

        def rows(given: Tensor) -> Tensor:
            return given[layer].view(len(layer), *(1,) * (x.ndim - 2), -1)

        angle = position[..., None] * rows(turn.frequency)
        pair = rows(turn.pair).expand(*angle.shape[:-1], -1)
        cosine, sine = angle.cos().gather(-1, pair), angle.sin().gather(-1, pair)
        other = x.gather(-1, rows(turn.partner).expand_as(x))
        return x * cosine - other * (sine * rows(turn.sign))

    def pair_norms(
        self, x: Float[Tensor, "B *S D"], layer: Int[Tensor, " B"]
    ) -> Float[Tensor, "B *S D"]:
        """Return the norms of pairs of dimensions of layers' vectors; see `Rope.pair_norms`."""
        partner = _turns(self, x.shape[-1], x.device).partner[layer]
        square, lead = x.square(), (len(layer), *(1,) * (x.ndim - 2), x.shape[-1])
        return (square + square.gather(-1, partner.view(lead).expand_as(x))).sqrt()


@lru_cache(maxsize=8)
def _turns(ropes: Ropes, dim: int, device: torch.device) -> _Turn:
    """Return the turns of all layers, with as many frequencies in each."""
    each = [_turn(rope, dim, device) for rope in ropes.each]
    most = max(len(turn.frequency) for turn in each)
    with torch.inference_mode(False):
        return _Turn(
            torch.stack([pad(t.frequency, (0, most - len(t.frequency))) for t in each]),
            torch.stack([t.pair for t in each]),
            torch.stack([t.sign for t in each]),
            torch.stack([t.partner for t in each]),
        )


@lru_cache(maxsize=64)
def turns_by_dimension(
    rope: Rope | Ropes, dim: int, device: torch.device
) -> tuple[Float[Tensor, "R D"], Int[Tensor, "R D"], Float[Tensor, "R D"]]:
    """Return what each dimension of a head rotates by, for kernels.

    Args:
        rope: of all layers, or per layer.
        dim: D, dimensions of a head.
        device: where the tensors are.

    Returns:
        For each layer, or once for all, the frequency of a dimension (0: it does not rotate), the
        other dimension of its pair (or itself), and the sign of that one's sine: by an angle a,
        x becomes cos(a) x - sign sin(a) x[partner].
    """
    with torch.inference_mode(False):  # cached tensors outlive the caller
        if isinstance(rope, Ropes):
            turn = _turns(rope, dim, device)
            return turn.frequency.gather(-1, turn.pair), turn.partner, turn.sign
        turn = _turn(rope, dim, device)
        return turn.frequency[turn.pair][None], turn.partner[None], turn.sign[None]


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
    value_in_key: bool = False  # a value is the first dimensions of its key, which is stored once
    folded: str | None = None  # fingerprint of the value basis in the model's weights; None: none

    def __post_init__(self) -> None:
        """Check that every size is positive, and that a key has the dimensions of its value."""
        for name in ("layers", "kv_heads", "group", "key_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a cache shape needs at least 1")
        if self.value_in_key and self.value_dim > self.key_dim:
            raise ValueError(
                f"values of {self.value_dim} dimensions cannot be the first ones of keys that have "
                f"{self.key_dim}; use value_in_key=False, or shorter values"
            )
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
        numbers = self.key_dim + (0 if self.value_in_key else self.value_dim)
        return self.layers * self.kv_heads * numbers * self.dtype.itemsize
