"""Find the rotary embedding of a layer by its vectors of equal tokens at several positions."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn import Module

from kv_policy import KVPolicy, Rope, Ropes, complete

POSITIONS: Final = (0, 1, 13, 101, 1009)  # distinguish frequencies from 1 to 0.0001
NEAR: Final = 1e-3  # relative to a vector's norm; a wrong rotation differs by far more
NEAR_IN_16_BITS: Final = 0.02  # tolerance for 16-bit rounding of the model's own rotation
_GROWING: Final = ("dynamic", "longrope")  # kinds whose frequencies depend on the sequence length
_APART: Final = 8  # ratio of the table rows that are read; small, so that rounding counts no turn


def needs_rotation(policy: KVPolicy) -> bool:
    """Return whether a policy rotates a layer's vectors, so that a host must find its rotation.

    False too if its basis stores keys that cannot be rotated, which `PolicyCache` refuses.
    """
    if policy.selector is None:
        return False
    selector = complete(policy.selector)
    return selector.needs_rope and (policy.basis is None or selector.scores_once)


def probe_positions(last: int) -> tuple[int, ...]:
    """Return the positions at which vectors are compared; `last` is the last one of a model."""
    return (*(position for position in POSITIONS if position < last), last)


def find_rope(
    vectors: Float[Tensor, "T P H D"],
    positions: Sequence[int],
    frequencies: Iterable[Sequence[float]],
) -> Rope | None:
    """Return the rotary embedding with which vectors of equal tokens differ by position.

    Args:
        vectors: tokens at several positions, the first of which is 0, in the model's dtype. At
            the last position only the norm counts, as the angle is too inexact there.
        positions: P of them.
        frequencies: radians a position that the model may use; no rotation is tried as well.

    Returns:
        None: no rotation of halves or neighbours, in either direction, explains the vectors.
    """
    near = NEAR if vectors.dtype.itemsize >= 4 else NEAR_IN_16_BITS
    vectors = vectors.float().cpu()
    norm = vector_norm(vectors, dim=-1)
    grown = (norm / norm[:, :1] - 1).abs().nan_to_num(0)
    if not grown.max() <= NEAR_IN_16_BITS:
        return None
    start = vectors[:, :1]
    size = vector_norm(start).clamp(min=torch.finfo(torch.float32).tiny)
    position = torch.tensor(positions[:-1])[:, None]
    least, best = near, None
    for rope in _candidates(frequencies, vectors.shape[-1]):
        off = rope.turned(start, position) - vectors[:, :-1]
        error = float(vector_norm(off, dim=(0, 2, 3)).max() / size)
        if error < least:
            least, best = error, rope
    return best


def joined_ropes(ropes: Sequence[Rope]) -> Rope | Ropes:
    """Return the rotary embedding of all layers: one if they are equal."""
    return ropes[0] if len(set(ropes)) == 1 else Ropes(tuple(ropes))


def growing_kind(model: Module) -> str | None:
    """Return a kind of rotary embedding of transformers that changes with the sequence length."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        for each in kind.values() if isinstance(kind, dict) else (kind,):
            if each in _GROWING:
                return str(each)
    return None


def model_frequencies(model: Module) -> Iterator[tuple[float, ...]]:
    """Yield the frequencies of a model's rotary embeddings, as transformers or vLLM store them."""
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and "original" not in name and buffer.ndim == 1:
            yield tuple(buffer.double().tolist())
        elif name.endswith("cos_sin_cache") and buffer.ndim == 2:
            yield from _of_table(buffer)


def _of_table(table: Float[Tensor, "L _"]) -> Iterator[tuple[float, ...]]:
    """Yield the frequencies of a table of cosines, then sines, with a row per position.

    A table may hold several, one after another: each begins where all sines are zero. Positions up
    to the last are read, so that angles are exact even if the table is rounded to 16 bits.
    """
    sines = table[:, table.shape[1] // 2 :]
    starts = [*(sines == 0).all(1).nonzero()[:, 0].tolist(), len(table)]
    for start, end in pairwise(starts):
        frequency = torch.zeros(sines.shape[1], dtype=torch.float64)
        position, last = 0, end - start - 1
        while position < last:
            position = min(max(1, _APART * position), last)
            cosine, sine = table[start + position].double().cpu().chunk(2)
            off = torch.atan2(sine, cosine) - position * frequency
            # The nearest angle, as the table says nothing of whole turns.
            frequency += (torch.remainder(off + math.pi, 2 * math.pi) - math.pi) / position
        if last > 0:
            yield tuple(frequency.tolist())


def _candidates(frequencies: Iterable[Sequence[float]], dim: int) -> Iterator[Rope]:
    """Yield the rotations to try: none, or the frequencies on the first or last dimensions."""
    yield Rope((), ())
    for each in dict.fromkeys(map(tuple, frequencies)):
        count = len(each)
        if 2 * count > dim:
            continue
        for first in dict.fromkeys((0, dim - 2 * count)):
            halves = tuple((first + i, first + count + i) for i in range(count))
            neighbours = tuple((first + 2 * i, first + 2 * i + 1) for i in range(count))
            for pairs in (halves, neighbours):
                yield Rope(each, pairs)
                yield Rope(each, tuple((j, i) for i, j in pairs))
