"""Storing under a selector: score, plan, and move tokens between tiers, pages and oblivion."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_attention import Attended
from kv_paging import PoolExhausted
from kv_policy import Budget, Observe, Queries, Selector
from kv_serve.batch import Batch, Pass
from kv_serve.carrying import enter, restack
from kv_serve.groups import layer_groups
from kv_serve.planning import Scored, plan_layers
from kv_serve.scoring import Observed, go_on, running_in, score
from kv_serve.stepping import step
from kv_serve.tally import Tally
from kv_serve.turns import Turns

_TOGETHER: Final = 1 << 18  # places of several layers, about, that are scored at once


@dataclass(frozen=True)
class _Arrival:
    """What a layer brought and its selector said, until the pass can be settled."""

    key: Float[Tensor, "B H L D"]
    value: Float[Tensor, "B H L Dv"]
    scored: Scored | None = None


class KeepSelected:
    """Keeps what a selector keeps, within each sequence's budget."""

    def __init__(
        self, selector: Selector, budgets: tuple[Budget | None, ...] | None, tally: Tally
    ) -> None:
        """Start for a batch; `budgets` holds a sequence's own budget, or None for the policy's."""
        self.selector = selector
        self.budgets = budgets
        self.tally = tally
        self.observe_prompt = selector.observe
        self.observe_step = selector.observe if selector.observe.generated else Observe()
        self._budget: Int[Tensor, " B"] | None = None  # tokens per head, as last resolved
        self._cuts: Float[Tensor, "K N B H"] | None = None  # of the last plan
        self._turns = Turns(selector.replan)
        self._planned: list[int] = []  # sequences that this pass plans
        self._prompted = False  # the last pass was over prompts
        self._waiting: list[_Arrival] = []
        self._observed: list[Observed] = []  # of the layers that are still to be scored
        self._fresh: list[Float[Tensor, "n B H 1"]] = []  # scores of what generated tokens brought

    def prepare(self, batch: Batch, now: Pass) -> None:
        """Say which sequences a prompt's plan is about; pages are seen to when the plan is made."""
        self._prompted = now.prompt
        if now.prompt:
            self._turns.prompt(len(batch.seen))
            self._planned = [] if now.more else self._turns.next(batch.sizes(now))

    def take(
        self,
        batch: Batch,
        now: Pass,
        layer: int,
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B H L Dv"],
        result: Attended,
        queries: Queries | None,
    ) -> None:
        """Score a layer's tokens; settle them now, or with all layers at the end of the pass."""
        running = running_in(now, self.selector)
        if running is not None:
            result = go_on(batch, now, layer, result, running)
        observed = Observed(key, value, result, queries)
        if not now.prompt:
            self._waiting.append(_Arrival(key, value))
            self._observed.append(observed)
            if len(self._observed) * observed.tokens >= _TOGETHER:
                self._score_step(batch, now)
            return
        scored = score(self.selector, batch, now, layer, [observed])
        arrival = _Arrival(key, value, scored)
        if self.selector.scope == "layer":
            self._plan_prompts(batch, now, layer, [arrival])
        else:
            self._waiting.append(arrival)

    def finish(self, batch: Batch, now: Pass) -> None:
        """Settle what waited for all layers."""
        self._score_step(batch, now)
        waiting, self._waiting = self._waiting, []
        if now.prompt:
            if waiting:
                self._plan_prompts(batch, now, 0, waiting)
            self._planned_all()
            batch.settle()
            return
        self._decode(batch, now, waiting)
        self._turns.step(len(batch.seen))

    def after(self, batch: Batch) -> None:
        """Plan the sequences whose turn it is, where the pass was not itself a plan."""
        if not self._prompted and self._turns.waiting:
            self._again(batch)
            if batch.pool.free > batch.pool.used:  # a prompt that had waited left more than stays
                batch.settle()

    def compress(self, batch: Batch) -> bool:
        """Plan all sequences now, because pages are short; False if the policy never does."""
        if not self.selector.replan.short:
            return False
        self._turns.all_due()
        while self._turns.waiting:
            self._again(batch)
        return True

    def join(self, other: "KeepSelected") -> None:
        """Let the sequences of another batch follow mine; the prompts of both have ended."""
        mine, theirs = (self._budget, self._cuts), (other._budget, other._cuts)
        assert mine[0] is not None, "budgets are resolved when a prompt is read"
        assert theirs[0] is not None, "budgets are resolved when a prompt is read"
        self._budget = torch.cat((mine[0], theirs[0]))
        if mine[1] is not None and theirs[1] is not None:
            self._cuts = torch.cat((mine[1], theirs[1]), 2)
        if self.budgets is not None or other.budgets is not None:
            own = self.budgets or (None,) * len(mine[0])
            self.budgets = own + (other.budgets or (None,) * len(theirs[0]))
        self._turns.join(other._turns)

    def _again(self, batch: Batch) -> None:
        with self.tally.timed():
            self._plan_stored(batch)
        self._planned_all()

    def _plan_prompts(
        self, batch: Batch, now: Pass, first: int, arrivals: Sequence[_Arrival]
    ) -> None:
        if not self._planned:  # prompts that go on: every token stays
            self._plan(batch, now, first, arrivals)
            return
        with self.tally.timed():
            self._plan(batch, now, first, arrivals)

    def _planned_all(self) -> None:
        self._turns.done(self._planned)
        self.tally.plans += bool(self._planned)

    def _plan_stored(self, batch: Batch) -> None:
        """Plan stored tokens anew, by the scores they carry."""
        shape, sequences = batch.shape, len(batch.seen)
        now = Pass(batch.seen.new_full((sequences, 0), -1), batch.seen)
        self._planned = self._turns.next(batch.sizes(now))
        lead = (sequences, shape.kv_heads, 0)
        reads = self.selector.reads
        key = torch.zeros(*lead, shape.key_dim, dtype=shape.dtype, device=batch.seen.device)
        value = torch.zeros(*lead, shape.value_dim, dtype=shape.dtype, device=batch.seen.device)
        arrivals = [
            _Arrival(
                key,
                value,
                Scored.carried(layer_groups(batch, now, slice(i, i + 1), key, value, reads)),
            )
            for i in range(shape.layers)
        ]
        if self.selector.scope == "model":
            self._plan(batch, now, 0, arrivals)
        else:
            for layer, arrival in enumerate(arrivals):
                self._plan(batch, now, layer, [arrival])

    def select(self, source: Int[Tensor, " B2"]) -> None:
        """Let budgets and turns follow their sequences."""
        order = source.tolist()
        self._turns.select(order)
        if self.budgets is not None:
            self.budgets = tuple(self.budgets[i] for i in order)
        if self._budget is not None:
            self._budget = self._budget[source]
        if self._cuts is not None:
            self._cuts = self._cuts[:, :, source]

    def _score_step(self, batch: Batch, now: Pass) -> None:
        """Score the layers that generated tokens have attended to since the last time."""
        observed, self._observed = self._observed, []
        if not observed or not (self.selector.observe.generated or self.selector.decode == "step"):
            return
        first = len(self._waiting) - len(observed)
        scored = score(self.selector, batch, now, first, observed)
        fresh = scored.split(scored.score)[-1]
        self._fresh.append(fresh.unflatten(0, (len(observed), -1)))

    def _plan(self, batch: Batch, now: Pass, first: int, arrivals: Sequence[_Arrival]) -> None:
        """Plan some layers together and carry it out, layer by layer."""
        if first == 0:
            self._budget = self._resolve(batch, now.total)
            if batch.pool.grows and self.selector.budget is not None:
                batch.reserve(torch.minimum(now.total, self._budget), spare=1)
        assert self._budget is not None
        scored = [a.scored for a in arrivals if a.scored is not None]
        due = None
        if len(self._planned) < len(now.total):
            due = torch.tensor(self._planned, dtype=torch.long, device=now.total.device)
        plans, cuts = plan_layers(
            self.selector,
            batch.shape,
            first,
            scored,
            now.total,
            self._budget,
            batch.window_size,
            batch.layout.page_tokens[..., first : first + len(arrivals), :],
            due,
        )
        if cuts is not None:
            if self._cuts is None:
                self._cuts = cuts.new_zeros(len(cuts), *batch.stores[0].length.shape)
            mine = self._cuts[:, first : first + len(arrivals)]
            mine[:, :, slice(None) if due is None else due] = cuts
        held = batch.pool.used
        for i, (arrival, plan) in enumerate(zip(arrivals, plans, strict=True)):
            restack(batch, first + i, scored[i], plan)
            enter(batch, now, first + i, (arrival.key, arrival.value), scored[i], plan)
        if first == 0 and batch.pool.grows and self.selector.budget is None:
            # Other layers take about as much, and growing once is cheaper than growing often.
            each = max(0, batch.pool.used - held) // len(arrivals)
            batch.pool.reserve(each * (batch.shape.layers - len(arrivals)))

    def _resolve(self, batch: Batch, total: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
        """Budgets of the sequences, in tokens per head."""
        token_bytes = batch.token_bytes
        least = max(1, self.selector.protected)
        own = self.selector.budget
        if own is None:
            return total
        if self.budgets is None:
            return own.resolve(total, token_bytes, least)
        rows = [
            (asked or own).resolve(total[i : i + 1], token_bytes, least)
            for i, asked in enumerate(self.budgets)
        ]
        return torch.cat(rows)

    def _decode(self, batch: Batch, now: Pass, arrivals: Sequence[_Arrival]) -> None:
        """Store one fresh token per sequence, for all layers at once."""
        key = torch.stack([a.key for a in arrivals])
        value = torch.stack([a.value for a in arrivals])
        given, self._fresh = self._fresh, []
        score = torch.cat(given) if given else torch.zeros_like(key[..., 0], dtype=torch.float32)
        position = now.position
        if batch.window is not None:
            key, value, position, left = batch.window.exchange(
                key, value, position, now.total, score
            )
            score = score if left is None else left
        rows = (
            key.flatten(0, 3),
            value.flatten(0, 3),
            score.flatten(),
            position[None, :, None].expand(key.shape[:-1]).flatten(),
        )
        try:
            self._store(batch, now, *rows)
        except PoolExhausted:
            if not self.selector.replan.short:
                raise
            self._make_room(batch, now, *rows)

    def _store(self, batch: Batch, now: Pass, *rows: Tensor) -> None:
        """Let one token enter each stream; nothing has changed if the pool has no page for it."""
        if self.selector.decode == "grow":
            batch.grow(*rows)
            return
        if self._budget is None:
            self._budget = self._resolve(batch, now.total)
        if self._cuts is None:
            lead = (self.selector.tiers, *batch.stores[0].length.shape)
            self._cuts = torch.zeros(lead, device=now.total.device)
        step(batch, self.selector, self._budget, self._cuts, now, *rows)

    def _make_room(self, batch: Batch, now: Pass, *rows: Tensor) -> None:
        """Plan sequences until the pool has the pages that a step takes, or none is left."""
        self._turns.all_due()
        while True:
            self._again(batch)
            try:
                self._store(batch, now, *rows)
                return
            except PoolExhausted:
                if not self._turns.waiting:
                    raise
