"""Requests that attend together in a step, as a padded batch of tokens."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_runtime.cache import PolicyCache


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The tokens of a cache's sequences in a step: a prompt, or one token per decoding sequence.

    Rows index the tokens of the step.
    """

    cache: PolicyCache
    real: Bool[Tensor, "B L"]  # which elements hold a token
    source: slice | Int[Tensor, " BL"]  # the row of each element; arbitrary for padding
    place: Int[Tensor, " n"] | None  # flat indices of elements with a token; None: all
    target: slice | Int[Tensor, " n"]  # the rows of these elements

    @classmethod
    def of(cls, cache: PolicyCache, row: Int[Tensor, "B L"], device: torch.device) -> "TokenRows":
        """Build the indices for a cache's sequences; row -1: no token of that sequence.

        The indices are moved to the device once for all layers.
        """
        real, rows = row >= 0, row.flatten()
        on_device = real.to(device)
        if not real.all():
            place = (rows >= 0).nonzero()[:, 0]
            found = (rows.clamp(min=0), place, rows[place])
            return cls(cache, on_device, *(x.to(device) for x in found))
        first = int(rows[0])
        if torch.equal(rows, torch.arange(first, first + len(rows))):
            these = slice(first, first + len(rows))
            return cls(cache, on_device, these, None, these)
        those = rows.to(device)
        return cls(cache, on_device, those, None, those)

    def begin(self, *, prompt: bool, more: bool) -> None:
        """Begin the forward pass of the step."""
        self.cache.begin(self.real, prompt=prompt, more=more)

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "m Q D"],
        key: Float[Tensor, "m H D"],
        value: Float[Tensor, "m H Dv"],
        scale: float,
        output: Float[Tensor, "m Q Dv"],
        softcap: float | None = None,
        sinks: Float[Tensor, " Q"] | None = None,
        *,
        more: bool = False,
    ) -> None:
        """Attend, store, and write the attention output to the tokens' rows of `output`.

        `softcap` is the bound of the logits, and `sinks` a logit of each query head, as for
        `kv_attention.attend`; `more` as for `PolicyCache.attend`.
        """
        grouped = self._places(query).unflatten(2, (key.shape[1], -1)).permute(0, 2, 3, 1, 4)
        fresh = (self._places(key).transpose(1, 2), self._places(value).transpose(1, 2))
        by_head = None if sinks is None else sinks.view(key.shape[1], -1)
        out = self.cache.attend(layer, grouped, *fresh, scale, softcap, by_head, more=more)
        self._write(out.permute(0, 3, 1, 2, 4), output)

    def _places(self, x: Float[Tensor, "m H D"]) -> Float[Tensor, "B L H D"]:
        """Copy the tokens, as the cache keeps some of them until all layers have attended.

        A compiled model or a CUDA graph reuses a layer's memory after its attention.
        """
        these = self.source
        here = x[these].clone() if isinstance(these, slice) else x.index_select(0, these)
        return here.view(*self.real.shape, *x.shape[1:])

    def _write(self, found: Float[Tensor, "B L H G Dv"], output: Float[Tensor, "m Q Dv"]) -> None:
        if isinstance(self.target, slice):
            output[self.target].view(found.shape).copy_(found)
            return
        rows = found.flatten(2, 3).flatten(0, 1)
        rows = rows if self.place is None else rows.index_select(0, self.place)
        output.index_copy_(0, self.target, rows.to(output.dtype))
