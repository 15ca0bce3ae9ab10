"""The second reading of prompts, whose tokens are all kept until a policy has its scores."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_attention import DenseTokens, attend_and_score, attend_partly, check_softmax
from kv_runtime.bases import Bases, by_stored_head
from kv_runtime.batch import Batch
from kv_runtime.forward_pass import Pass


@dataclass(frozen=True)
class ReplayChunk:
    """A chunk of each prompt of a batch, which the model reads again after an instruction.

    Attributes:
        position: of the replayed columns, after the prompt's; -1: padding.
        first: position in the prompt of the chunk's first token.
        end: position in the prompt after its last; `first` if a sequence has no such chunk.
    """

    position: Int[Tensor, "B R"]
    first: Int[Tensor, " B"]
    end: Int[Tensor, " B"]


@dataclass
class WaitingPrompts:
    """The new tokens of prompts by layer, and the largest probability of those replayed so far."""

    now: Pass  # the prompts' part of the pass
    keys: list[Float[Tensor, "B H L D"]] = field(default_factory=list)
    values: list[Float[Tensor, "B H L Dv"]] = field(default_factory=list)
    replayed: list[Float[Tensor, "B H L"]] = field(default_factory=list)

    def add(self, key: Float[Tensor, "B H L D"], value: Float[Tensor, "B H L Dv"]) -> None:
        """Add the new tokens of the next layer, none of them replayed."""
        dtype = torch.promote_types(key.dtype, torch.float32)
        self.keys.append(key)
        self.values.append(value)
        self.replayed.append(torch.zeros_like(key[..., 0], dtype=dtype))

    def tokens(
        self, layer: int, columns: slice, held: Bool[Tensor, "B _"], full: bool
    ) -> DenseTokens:
        """Return a layer's new tokens in some columns, those that are `held`; `full`: all are."""
        place = self.now.position[:, columns].masked_fill(~held, -1)
        key, value = self.keys[layer][:, :, columns], self.values[layer][:, :, columns]
        return DenseTokens(key, value, place, full)


@dataclass(frozen=True)
class _Columns:
    """The tokens of some columns of a pass that a chunk has, or has not."""

    at: slice
    held: Bool[Tensor, "B _"]
    full: bool

    @classmethod
    def of(cls, at: slice, chosen: Bool[Tensor, "B L"]) -> "list[_Columns]":
        """Return the chosen tokens in these columns; none if there are none."""
        held = chosen[:, at]
        return [cls(at, held, bool(held.all()))] if held.any() else []


class Rereading:
    """A pass in which the model reads a chunk of the waiting prompts again; nothing is stored."""

    def __init__(
        self,
        prompts: WaitingPrompts,
        batch: Batch,
        bases: Bases | None,
        chunk: ReplayChunk,
        backend: str,
    ) -> None:
        """Find the chunk's columns in the pass over the prompts."""
        self._backend = backend
        self._prompts, self._batch, self._bases, self._chunk = prompts, batch, bases, chunk
        place = prompts.now.position
        inside = (place >= chunk.first[:, None]) & (place < chunk.end[:, None])
        outside = (place >= 0) & ~inside
        columns = inside.any(0).nonzero().flatten()
        low, high = (int(columns[0]), int(columns[-1]) + 1) if len(columns) else (0, 0)
        self._near = _Columns.of(slice(low, high), inside)
        each = (slice(0, low), slice(low, high), slice(high, place.shape[1]))
        self._far = [found for at in each for found in _Columns.of(at, outside)]

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "B H G R D"],
        key: Float[Tensor, "B H R D"],
        value: Float[Tensor, "B Hv R Dv"],
        scale: float,
        softcap: float | None = None,
        sinks: Float[Tensor, "H G"] | None = None,
    ) -> Float[Tensor, "B Hv Gv R Dv"]:
        """Attend over all tokens of the sequences and the replayed ones; score the chunk's tokens.

        The probabilities that score a token are normalized over the chunk's tokens in the prompt
        and the replayed ones, with the sinks. Arguments and output are as in `PolicyCache.attend`.
        """
        check_softmax(query, softcap, sinks)
        value_dim, dtype = value.shape[-1], query.dtype
        bases, place = self._bases, self._chunk.position
        if bases is not None:
            query = bases.queries(layer, query)
            sinks = by_stored_head(query, sinks)
            key, value = bases.keys(layer, key), bases.values(layer, value)
        near = [self._prompts.tokens(layer, c.at, c.held, c.full) for c in self._near]
        own = DenseTokens(key, value, place)
        scored = attend_and_score(
            query, place, [*near, own], len(near), scale, self._backend, softcap, sinks
        )
        for columns, most in zip(self._near, scored.largest, strict=True):
            replayed = self._prompts.replayed[layer][..., columns.at]
            replayed.copy_(most.where(columns.held[:, None], replayed))
        pages, dense = self._batch.views(layer)
        dense += [self._prompts.tokens(layer, c.at, c.held, c.full) for c in self._far]
        found = scored.partial
        if pages or dense:
            # `scored` has counted the sinks.
            found = found + attend_partly(query, place, pages, dense, scale, self._backend, softcap)
        out = found.out.to(dtype)
        return out if bases is None else bases.undone(layer, out, value_dim)
