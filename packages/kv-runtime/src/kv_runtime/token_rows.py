"""Requests that attend together in a step, as a padded batch of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_runtime.cache import PolicyCache
from kv_runtime.copies import to_device
from kv_runtime.output_rows import decode_rows, write_rows


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
        on_device = to_device(real, device)
        if not real.all():
            place = (rows >= 0).nonzero()[:, 0]
            found = (rows.clamp(min=0), place, rows[place])
            return cls(cache, on_device, *(to_device(x, device) for x in found))
        first = int(rows[0])
        if torch.equal(rows, torch.arange(first, first + len(rows))):
            these = slice(first, first + len(rows))
            return cls(cache, on_device, these, None, these)
        those = to_device(rows, device)
        return cls(cache, on_device, those, None, those)

    @classmethod
    def one_each(cls, cache: PolicyCache, row: Sequence[int], device: torch.device) -> "TokenRows":
        """Build the indices of one token per sequence, as `of`, from rows that the host knows."""
        first = row[0]
        if first < 0 or list(row) != list(range(first, first + len(row))):
            return cls.of(cache, torch.tensor(row)[:, None], device)
        these = slice(first, first + len(row))
        real = torch.ones(len(row), 1, dtype=torch.bool, device=device)
        return cls(cache, real, these, None, these)

    def begin(self, *, prompt: bool, remaining: int = 0) -> None:
        """Begin the forward pass of the step, which `PolicyCache.count` ends if it is decode."""
        self.cache.begin(self.real, prompt=prompt, remaining=remaining, counted=prompt)

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
        heads = key.shape[1]
        by_head = None if sinks is None else sinks.view(heads, -1)
        if isinstance(self.target, slice) and self.real.shape[1] == 1 and not more:
            step = query, key, value, scale, output, self.target.start, softcap, by_head
            if self.cache.attend_rows(layer, *step):
                return
        keep = self.cache.reads_queries
        grouped = self._places(query, keep=keep).unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)
        k, v = (each.transpose(1, 2) for each in self._copies(key, value))
        into = decode_rows(output, self.target, self.real.shape[1], heads)
        out = self.cache.attend(layer, grouped, k, v, scale, softcap, by_head, more=more, out=into)
        if out is not into:
            write_rows(out, output, self.target, self.place)

    def _places(self, x: Float[Tensor, "m H D"], *, keep: bool) -> Float[Tensor, "B L H D"]:
        """Return the tokens, or a copy of them.

        What is read when all layers have attended must be a copy: a compiled model or a CUDA graph
        reuses a layer's memory after its attention.
        """
        these = self.source
        here = x[these] if isinstance(these, slice) else x.index_select(0, these)
        here = here.clone() if keep and isinstance(these, slice) else here
        return here.view(*self.real.shape, *x.shape[1:])

    def _copies(
        self, key: Float[Tensor, "m H D"], value: Float[Tensor, "m H Dv"]
    ) -> tuple[Float[Tensor, "B L H D"], Float[Tensor, "B L H Dv"]]:
        """Copy keys and values, in one launch if they are alike."""
        if isinstance(self.source, slice) and key.shape == value.shape and key.dtype == value.dtype:
            both = torch.stack((key[self.source], value[self.source]))
            first, second = both.view(2, *self.real.shape, *key.shape[1:])
            return first, second
        return self._places(key, keep=True), self._places(value, keep=True)
