"""Drafted tokens of decoding requests: attended as decoded tokens, stored once they are right.

A step verifies the newest token of a request, and drafts after it. Each attends to what it would
attend to as the only token of its step: to all tokens before it as decode steps store them. For
that the tokens before a draft are stored in one layer, and taken back when its drafts have
attended. So between steps a cache holds tokens alone that are right, and drafts are vectors beside
it, until the next step says how many of them are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kv_policy import KVPolicy, complete
from kv_runtime.batch import Batch, Pass, flat


@dataclass(frozen=True, slots=True)
class TokenVectors:
    """Vectors of one token per sequence in a layer, or in all of them (N leads).

    Attributes:
        key: as it is stored: projected, if the policy has a basis.
        value: the same.
        own_key: as the model computes it.
        own_value: the same.
    """

    key: Float[Tensor, "*N B H 1 D"]
    value: Float[Tensor, "*N B Hv 1 Dv"]
    own_key: Float[Tensor, "*N B Hk 1 Dk"]
    own_value: Float[Tensor, "*N B Hu 1 Du"]

    @property
    def each(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All of them."""
        return self.key, self.value, self.own_key, self.own_value

    @classmethod
    def stacked(cls, layers: Sequence["TokenVectors"]) -> "TokenVectors":
        """Return the vectors of all layers, a copy."""
        return cls(*(torch.stack(x) for x in zip(*(layer.each for layer in layers), strict=True)))

    @classmethod
    def joined(cls, sequences: Sequence["TokenVectors"]) -> "TokenVectors":
        """Return the vectors of several sequences in all layers, a copy."""
        parts = zip(*(sequence.each for sequence in sequences), strict=True)
        return cls(*(torch.cat(x, 1) for x in parts))

    def of(self, sequence: int) -> "TokenVectors":
        """Return a copy of the vectors of one sequence in all layers."""
        return TokenVectors(*(x[:, sequence : sequence + 1].clone() for x in self.each))

    def layer(self, layer: int) -> "TokenVectors":
        """Return the vectors of one layer."""
        return TokenVectors(*(x[layer] for x in self.each))


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Drafts of a request that its cache does not hold.

    Attributes:
        first: tokens of the request before the first of them; the cache holds these.
        drafts: each in all layers, of one sequence.
    """

    first: int
    drafts: tuple[TokenVectors, ...] = ()

    def right(self, computed: int) -> tuple[TokenVectors, ...]:
        """Return the drafts that were right.

        Args:
            computed: tokens of the request that are right.

        Raises:
            ValueError: these are fewer than the cache holds, or more than were drafted.
        """
        count = computed - self.first
        if not 0 <= count <= len(self.drafts):
            raise ValueError(
                f"a step goes on after {computed} tokens, but the cache holds {self.first} and "
                f"{len(self.drafts)} drafts; please report this with the engine's version"
            )
        return self.drafts[:count]


@dataclass(slots=True)
class Verified:
    """A decode pass with drafts.

    Attributes:
        passes: the decode passes that its columns would be; the first is that of tokens that are
            right.
        layers: the drafts of each layer that has attended, by column.
    """

    passes: tuple[Pass, ...]
    layers: list[tuple[TokenVectors, ...]] = field(default_factory=list)

    @classmethod
    def of(cls, now: Pass, drafts: Sequence[Bool[Tensor, "B 1"]]) -> "Verified":
        """Return a pass with further columns.

        Args:
            now: the pass of the first column.
            drafts: which sequences have a draft, for each further column.
        """
        passes = [now]
        for valid in drafts:
            before = passes[-1].total
            position = before[:, None].masked_fill(~valid, -1)
            passes.append(Pass(position, before + valid[:, 0].long(), is_prefill=False))
        return cls(tuple(passes))

    def pending(self, sequence: int, first: int, count: int) -> PendingTokens:
        """Return a sequence's `count` drafts, once all layers have attended."""
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


def unlike_drafts(policy: KVPolicy) -> str | None:
    """Return why drafts under a policy would not be attended as decoded tokens; None: they are.

    Generated tokens must join the others and do nothing else: a step with drafts stores and
    observes none of them before it is known to be right.
    """
    selector = None if policy.selector is None else complete(policy.selector)
    if selector is None:
        return None
    if selector.observe.generated:
        return "it observes the attention of generated queries, and that of a rejected draft too"
    if selector.decode == "step":
        return "each generated token evicts or moves another, which drafts after it must not see"
    if selector.replan.every or selector.replan.uncompressed:
        return "it plans again while tokens are generated, also between drafts of one step"
    return None
