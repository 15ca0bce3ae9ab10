"""The attention of a decode pass whose tokens are followed by drafts.

A draft attends to what it would attend to as the only token of its step: to all tokens before it as
decode steps store them. For that the tokens before a draft are stored in one layer, and taken back
when its drafts have attended.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kv_policy import KVPolicy, Observe
from kv_runtime import checks
from kv_runtime.attention import attended
from kv_runtime.bases import Bases, by_stored_head
from kv_runtime.batch import Batch, Pass, flat
from kv_runtime.pending import PendingTokens, TokenVectors

# Queries, keys and values of one token per sequence.
Column: TypeAlias = tuple[
    Float[Tensor, "B H G 1 D"], Float[Tensor, "B H 1 D"], Float[Tensor, "B Hv 1 Dv"]
]


@dataclass(slots=True)
class Verified:
    """A decode pass with drafts; see `PolicyCache.begin_drafts`.

    Attributes:
        batch: the stored tokens.
        policy: the policy.
        bases: the bases of its vectors; None: it has none.
        backend: the backend of attention.
        passes: the decode passes that the columns would be; the first is that of tokens that are
            right.
        layers: the drafts of each layer that has attended, by column.
    """

    batch: Batch
    policy: KVPolicy
    bases: Bases | None
    backend: str
    passes: tuple[Pass, ...]
    layers: list[tuple[TokenVectors, ...]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        now: Pass,
        drafts: Sequence[Bool[Tensor, "B 1"]],
        batch: Batch,
        policy: KVPolicy,
        bases: Bases | None,
        backend: str,
    ) -> "Verified":
        """Return a pass with further columns.

        Args:
            now: the pass of the first column.
            drafts: which sequences have a draft, for each further column.
            batch: the stored tokens.
            policy: the policy.
            bases: its bases.
            backend: the backend of attention.
        """
        passes = [now]
        for valid in drafts:
            before = passes[-1].total
            position = before[:, None].masked_fill(~valid, -1)
            passes.append(Pass(position, before + valid[:, 0].long(), is_prefill=False))
        return cls(batch, policy, bases, backend, tuple(passes))

    def attend(
        self,
        layer: int,
        tokens: Sequence[Column],
        scale: float,
        softcap: float | None = None,
        sinks: Float[Tensor, "H G"] | None = None,
        *,
        more: bool = False,
    ) -> list[Float[Tensor, "B Hv Gv 1 _"]]:
        """Attend to the drafts of a layer, before `PolicyCache.attend` to the tokens they follow.

        The layer holds the same bytes before and after.

        Args:
            layer: the layer.
            tokens: the vectors of each column, that of `PolicyCache.attend` first.
            scale: as for `PolicyCache.attend`.
            softcap: the same.
            sinks: the same.
            more: the same.

        Returns:
            The attention of each column but the first; 0 where a sequence has no draft.

        Raises:
            RuntimeError: layers are out of order.
            kv_paging.PoolExhausted: a fixed pool is too small for the drafts.
        """
        if layer != len(self.layers):
            raise RuntimeError(
                f"drafts attend in layer {layer}, but layer {len(self.layers)} was expected"
            )
        bases = self.bases
        if bases is not None:
            checks.check_shift(self.policy, bases.key_maps[layer], softcap, sinks)
            sinks = by_stored_head(bases.queries(layer, tokens[0][0]), sinks)
        held, found, vectors = Tentative(self.batch, layer), [], []
        for i, (now, (query, own_key, own_value)) in enumerate(
            zip(self.passes, tokens, strict=True)
        ):
            key, value = own_key, own_value
            if bases is not None:
                query = bases.queries(layer, query)
                key, value = bases.keys(layer, key), bases.values(layer, value)
            vectors.append(TokenVectors(key, value, own_key, own_value))
            if i:
                held.store(self.passes[i - 1], vectors[i - 1])
                options = scale, (Observe(),), self.backend, softcap, sinks
                out = attended(self.batch, now, layer, (query, key, value), *options).out
                undone = out if bases is None else bases.undone(layer, out, own_value.shape[-1])
                found.append(undone)
        held.end()
        if not more:
            self.layers.append(tuple(vectors[1:]))
        return found

    def pending(self, sequence: int, first: int, count: int) -> PendingTokens:
        """Return the drafts of a sequence, once all layers have attended.

        Args:
            sequence: its number.
            first: tokens of the request before the drafts.
            count: its drafts.
        """
        columns = [*zip(*self.layers, strict=True)][:count]
        drafts = [TokenVectors.stacked(layers).of(sequence) for layers in columns]
        return PendingTokens(first, tuple(drafts))


class Tentative:
    """Tokens in one layer of a batch, stored as decode steps store them, and then taken back."""

    def __init__(self, batch: Batch, layer: int) -> None:
        """Mark what the layer holds."""
        self._batch, self._layer = batch, slice(layer, layer + 1)
        self._rows = batch.table_rows(self._layer)
        self._marks = batch.tiers.marked(self._rows)
        self._left: list[tuple[Pass, Tensor, Tensor]] = []

    def store(self, now: Pass, token: TokenVectors) -> None:
        """Store a token of each sequence that a decode pass would store.

        Raises:
            kv_paging.PoolExhausted: the pool has too few pages.
        """
        batch, key, value, position = self._batch, token.key, token.value, now.position
        if batch.window is not None:
            given = key[None], value[None], position, now.total
            old_key, old_value, position, _ = batch.window.exchange(*given, layers=self._layer)
            self._left.append((now, old_key, old_value))
            batch.window.hold_newest(now.total)
            key, value = old_key[0], old_value[0]
        where = flat(batch.by_head(position))
        layout = batch.tiers.parts[0].layout
        score = torch.zeros_like(where, dtype=torch.float32) if layout.scores else None
        stored = where.int() if layout.positions else None
        batch.tiers.append(0, self._rows, flat(key), flat(value), where >= 0, score, stored)

    def end(self) -> None:
        """Take all tokens back; the layer holds what it did, and the same bytes."""
        for now, key, value in reversed(self._left):
            assert self._batch.window is not None, "they are from it"
            self._batch.window.exchange(key, value, now.position, now.total, layers=self._layer)
        if self._batch.window is not None:
            self._batch.window.hold_newest(self._batch.seen)
        for mark in self._marks:
            mark.take_back()
