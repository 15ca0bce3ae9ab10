"""Decoding requests of which some verify drafts, as columns of one token per sequence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_attention import Attended
from kv_runtime.cache import PolicyCache
from kv_runtime.copies import to_device
from kv_runtime.output_rows import write_rows
from kv_runtime.pending import PendingTokens, TokenVectors
from kv_runtime.token_rows import TokenRows
from kv_runtime.verified import Verified


@dataclass(frozen=True, slots=True)
class _Column:
    """One token of each sequence, or none."""

    taken: TokenRows  # of tensors with a row for each sequence, in order
    source: Int[Tensor, " B"]  # the row of each; arbitrary where there is none
    place: Int[Tensor, " n"]  # the sequences with a token
    target: Int[Tensor, " n"]  # the rows of these

    @classmethod
    def of(cls, cache: PolicyCache, row: Sequence[int], device: torch.device) -> "_Column":
        """Build the indices of rows; -1: no token of that sequence."""
        place = [i for i, each in enumerate(row) if each >= 0]
        given = [*(max(0, each) for each in row), *place, *(row[i] for i in place)]
        moved = to_device(torch.tensor(given), device)
        source, place_, target = moved.split([len(row), len(place), len(place)])
        real = torch.zeros(len(row), 1, dtype=torch.bool, device=device)
        real[place_] = True
        every = slice(0, len(row))
        return cls(TokenRows(cache, real, every, None, every), source, place_, target)

    def take(self, x: Float[Tensor, "m H D"]) -> Float[Tensor, "B H D"]:
        """Return a copy of the tokens' rows, by sequence."""
        return x.index_select(0, self.source)


@dataclass(slots=True)
class DraftedRows:
    """The tokens of a decode step, and drafts after them; rows index the tokens of the step.

    Attributes:
        cache: the cache of the sequences.
        columns: the tokens that are right, then the first draft of each sequence, and so on.
        drafts: the drafts of each sequence.
    """

    cache: PolicyCache
    columns: tuple[_Column, ...]
    drafts: tuple[int, ...]
    _verified: Verified | None = field(default=None, init=False)  # of the pass, once it began

    @classmethod
    def of(
        cls, cache: PolicyCache, row: Sequence[int], drafts: Sequence[int], device: torch.device
    ) -> "DraftedRows":
        """Build the indices of all columns.

        Args:
            cache: the cache of the sequences.
            row: the row of each sequence's first token, before its drafts; -1: it has none.
            drafts: its drafts.
            device: the device of the step's tensors.
        """
        counts = [count if at >= 0 else -1 for at, count in zip(row, drafts, strict=True)]
        columns = [
            [at + i if i <= count else -1 for at, count in zip(row, counts, strict=True)]
            for i in range(1 + max(counts))
        ]
        made = tuple(_Column.of(cache, each, device) for each in columns)
        return cls(cache, made, tuple(max(0, count) for count in counts))

    @property
    def target(self) -> Int[Tensor, " n"]:
        """The rows of all tokens."""
        return torch.cat([column.target for column in self.columns])

    def begin(self) -> None:
        """Begin the forward pass of the step, which `PolicyCache.count` ends."""
        first, *drafts = (column.taken for column in self.columns)
        first.begin(prompt=False)
        self._verified = self.cache.begin_drafts([each.real for each in drafts])

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
        """Attend, store the first column, and write all rows, as `TokenRows.attend`."""
        assert self._verified is not None, "begin was called"
        heads, (first, *drafts) = key.shape[1], self.columns
        mine = [[column.take(x) for x in (query, key, value)] for column in self.columns]
        grouped = [
            (q.unflatten(1, (heads, -1))[:, :, :, None], k[:, :, None], v[:, :, None])
            for q, k, v in mine
        ]
        by_head = None if sinks is None else sinks.view(heads, -1)
        found = self._verified.attend(layer, grouped, scale, softcap, by_head, more=more)
        for column, out in zip(drafts, found, strict=True):
            write_rows(out, output, column.target, column.place)
        into = output.new_empty(len(first.source), *output.shape[1:])
        q, k, v = mine[0]
        first.taken.attend(layer, q, k, v, scale, into, softcap, sinks, more=more)
        output.index_copy_(0, first.target, into.index_select(0, first.place))

    def pending(self, names: Sequence[str], steps: Mapping[str, int]) -> dict[str, PendingTokens]:
        """Return the drafts of all sequences that have some, by name, after the pass.

        Args:
            names: the names of the sequences.
            steps: tokens of each that are right, by name.
        """
        assert self._verified is not None, "begin was called"
        return {
            name: self._verified.pending(i, steps[name], self.drafts[i])
            for i, name in enumerate(names)
            if self.drafts[i]
        }


def store_drafts(cache: PolicyCache, valid: Bool[Tensor, "B 1"], tokens: TokenVectors) -> None:
    """Store drafts that were right, one of each sequence, as a decode pass would have.

    Args:
        cache: the cache, between two passes.
        valid: which sequences have one.
        tokens: the drafts in all layers; those of other sequences are ignored.

    Raises:
        kv_paging.PoolExhausted: a fixed pool is too small for the new tokens.
    """
    cache.begin(valid, prompt=False, counted=False)
    for layer in range(cache.shape.layers):
        each = tokens.layer(layer)
        nothing = Attended(each.own_value[:, :, None])
        cache.keep(layer, each.key, each.value, nothing, None, (each.own_key, each.own_value))
    cache.count()
