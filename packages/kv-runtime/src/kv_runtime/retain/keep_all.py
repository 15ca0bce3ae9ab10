"""Storage without a selector: tokens move through the raw window to the only tier."""

from collections.abc import Collection, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_attention import Attended
from kv_policy import Observe, Queries, Running
from kv_runtime.batch import Batch, Pass, flat
from kv_runtime.forward_pass import Forward


class KeepAll:
    """Stores every token when it leaves the window."""

    observe_prompt = observe_step = Observe()
    running = None  # tokens have no scores
    grows = True  # generated tokens are appended, and none is evicted

    def __init__(self) -> None:
        """Start without pending tokens."""
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._taken: tuple[Tensor, Tensor] | None = None  # the decoded tokens of all layers

    def takes_layers(self, running: Running | None) -> bool:
        """Whether `take_layers` may take a decode pass."""
        return True

    def take_layers(
        self,
        batch: Batch,
        now: Pass,
        key: Float[Tensor, "N B H 1 D"],
        value: Float[Tensor, "N B H 1 Dv"],
        results: Sequence[Attended],
    ) -> None:
        """Take the decoded tokens of all layers, as `take` of each."""
        self._taken = key, value

    def prepare(self, batch: Batch, now: Forward) -> None:
        """Reserve the pages before anything is stored."""
        if now.whole.is_prefill:
            batch.reserve((now.whole.total - batch.window_size).clamp(min=0), spare=1)

    def take(
        self,
        batch: Batch,
        now: Pass,
        layer: int,
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B H L Dv"],
        result: Attended,
        queries: Queries | None,
        unprojected: tuple[Float[Tensor, "B Hk L Dk"], Float[Tensor, "B Hu L Du"]],
    ) -> None:
        """Store a prompt's tokens layer by layer; decoded tokens wait for the end of the pass."""
        if not now.is_prefill:
            self._waiting.append((key, value))
            return
        key, value, position = self._leaving(batch, now, layer, key, value)
        keep = flat(batch.by_head(position)) >= 0
        table_rows = batch.table_rows(slice(layer, layer + 1))
        batch.tiers.append(0, table_rows, flat(key), flat(value), keep, None, None)

    def finish(self, batch: Batch, now: Pass, replayed: Sequence[Tensor] = ()) -> None:
        """Store one token per sequence, for all layers at once."""
        if now.is_prefill:
            return
        waiting, self._waiting = self._waiting, []
        taken, self._taken = self._taken, None
        if taken is None:
            taken = torch.stack([k for k, _ in waiting]), torch.stack([v for _, v in waiting])
        key, value = taken
        position = now.position
        if batch.window is not None:
            key, value, position, _ = batch.window.exchange(key, value, now.position, now.total)
        where = position[None, :, None].expand(key.shape[:-1])
        batch.grow(key.flatten(0, 3), value.flatten(0, 3), None, where.flatten())

    def after(self, batch: Batch, stepped: tuple[int, ...] | None) -> None:
        """Do nothing: there are no plans."""

    def fix(self, batch: Batch) -> None:
        """Do nothing: there is no state per sequence."""

    def adopt(self, sequence: int, other: object) -> None:
        """Do nothing: there is no state per sequence."""

    def clear(self, sequences: Collection[int]) -> None:
        """Do nothing: there is no state per sequence."""

    def abandon(self) -> None:
        """Drop the tokens of an unfinished decode pass."""
        self._waiting, self._taken = [], None

    def branch(self, sequence: int, other: object) -> None:
        """Do nothing: there is no state per sequence."""

    def plans(self) -> None:
        """Return the state of plans: there is none."""
        return

    def select(self, source: Int[Tensor, " B2"]) -> None:
        """Do nothing: there is no state per sequence."""

    def compress(self, batch: Batch, pages: int | None = None) -> list[int]:
        """Return none: every token is kept."""
        return []

    @staticmethod
    def _leaving(
        batch: Batch, now: Pass, layer: int, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Int[Tensor, "B A"]]:
        """Return the tokens that leave the window, oldest first (position -1: a token stays)."""
        raw = batch.window
        if raw is None:
            return key, value, now.position
        old_key, old_value, old_position = raw.in_order(layer)
        position = torch.cat([old_position, now.position], 1)
        keys, values = torch.cat([old_key, key], 2), torch.cat([old_value, value], 2)
        raw.put(slice(layer, layer + 1), key[None], value[None], now.position, now.total)
        return keys, values, position.masked_fill(raw.stays(position, now.total), -1)
