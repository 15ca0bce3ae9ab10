"""Storage with a selector: score and plan tokens, move them between tiers, and evict them."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from kv_attention import Attended
from kv_paging import PoolExhausted
from kv_policy import Budget, CacheShape, CompleteSelector, Observe, Queries, Running
from kv_runtime.batch import Batch, Pass
from kv_runtime.forward_pass import Forward
from kv_runtime.retain.answers import expect_numbers
from kv_runtime.retain.apply import Entry, enter, restack_layers
from kv_runtime.retain.budgets import resolved
from kv_runtime.retain.careful import Careful
from kv_runtime.retain.decode import step
from kv_runtime.retain.groups import loose_groups
from kv_runtime.retain.keep_all import KeepAll
from kv_runtime.retain.merging import Changed, merged, with_vectors
from kv_runtime.retain.planning import Scored, plan_layers, stay
from kv_runtime.retain.plans import Plans
from kv_runtime.retain.replan import replan
from kv_runtime.retain.scoring import Observed, score, score_new
from kv_runtime.retain.turns import Turns
from kv_runtime.stats import Tally

# Approximate number of tokens of several layers scored at once; on a device, if their scores go on
# where they are stored, which takes few bytes for each.
_TOGETHER: Final = 1 << 18
_TOGETHER_ON_DEVICE: Final = 1 << 22
_STORED_TOGETHER: Final = 1 << 16  # the same of prompts, whose vectors wait to enter pages

_Plan: TypeAlias = Sequence[UInt8[Tensor, "B H _"]]  # tiers of a layer's tokens, by group


@dataclass(frozen=True)
class _Arrival:
    """New tokens of a layer and their scores, until the pass is completed."""

    key: Float[Tensor, "B H L D"]
    value: Float[Tensor, "B H L Dv"]
    scored: Scored | None = None

    def scored_as(self, scored: Scored) -> "_Arrival":
        """Return the tokens with their scores."""
        return replace(self, scored=scored)


class KeepSelected:
    """Keeps the tokens chosen by a selector, within each sequence's budget."""

    def __init__(
        self,
        selector: CompleteSelector,
        shape: CacheShape,
        budgets: tuple[Budget | None, ...] | None,
        tally: Tally,
        *,
        careful: bool = False,
    ) -> None:
        """Initialize for a batch.

        Args:
            selector: the selector.
            shape: the shape of the model's own vectors.
            budgets: a sequence's own budget, or None for the policy's.
            tally: counts plans.
            careful: whether a selector's error is isolated to the sequence that causes it.
        """
        self._careful = Careful(selector) if careful else None
        self.selector: CompleteSelector = self._careful or selector
        self.shape, self.budgets = shape, budgets
        self.tally = tally
        self.grows = selector.decode == "grow"  # generated tokens are appended between plans
        self.observe_step = selector.observe if selector.observe.generated else Observe()
        self._budget: Int[Tensor, " B"] | None = None  # tokens per head, last resolved
        self._thresholds: Float[Tensor, "K N B H"] | None = None  # from the last plan
        self._turns = Turns(selector.replan)
        self._planned: list[int] = []  # sequences planned in this pass
        self._mixed = False  # this pass has both prefill and decode
        self._unscored = False  # a later pass scores the prompts of this one, with all others
        self._unobserved = False  # nothing is observed in this pass, which has prompts alone
        self._stepped: tuple[int, ...] | None = ()  # decoding sequences of this pass; None: all
        self._waiting: list[_Arrival] = []  # prefill
        self._unmet: list[tuple[_Arrival, Observed]] = []  # prefill, until layers are scored
        self._unread: list[tuple[_Arrival, Observed]] = []  # prefill, until its replay
        self._later: list[tuple[Tensor, Tensor]] = []  # prefill that a later pass scores
        self._decided: list[tuple[_Arrival, _Plan]] = []  # planned prefill that is not stored yet
        self._steps: list[_Arrival] = []  # decode
        self._taken: tuple[Tensor, Tensor] | None = None  # the decoded tokens of all layers
        self._observed: list[Observed] = []  # layers not scored yet
        self._wrong: list[Bool[Tensor, ""]] = []  # whether a layer's prefill scores are NaN
        self._fresh: list[Float[Tensor, "n B H 1"]] = []  # scores of decoded tokens

    @property
    def observe_prompt(self) -> Observe:
        """What the current pass over prompts observes."""
        return Observe() if self._unobserved else self.selector.observe

    @property
    def running(self) -> Running | None:
        """How attention in a decode step may update stored scores; None: it may not."""
        selector, observe = self.selector, self.selector.observe
        masses_alone = observe.generated and not observe.also and not selector.scores_once
        return selector.running if masses_alone else None

    def takes_layers(self, running: Running | None) -> bool:
        """Whether `take_layers` may take a decode pass: its attention has no sums of stored ones.

        Args:
            running: how it updates their scores; None: it does not.
        """
        sums = self.selector.observe.generated and running is None
        return not sums and not self.selector.scores_once

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
        if self._scores_steps:
            self._fresh.append(score_new(self.selector, batch, now, key, value, results))

    @property
    def _scores_steps(self) -> bool:
        """Whether decoded tokens have scores of their own."""
        selector = self.selector
        return selector.observe.generated or selector.scores_once or selector.decode == "step"

    def prepare(self, batch: Batch, now: Forward) -> None:
        """Choose the sequences of a prefill's plan; pages are reserved when the plan is made."""
        self._stepped, self._mixed = (), len(now.parts) > 1
        self._later, self._decided = [], []
        selector, whole = self.selector, now.whole
        alone = whole.is_partial_prefill and not self._mixed
        last = selector.observe.last
        later = selector.scores_last and last is not None and whole.remaining >= last
        self._unscored = alone and later
        # Scores that are given once are adjusted at the end of a prompt.
        self._unobserved = self._unscored or (alone and selector.scores_once)
        if self._careful is not None:
            self._careful.sequences = len(batch.seen)
        for each in (part.now for part in now.parts):
            if not each.is_prefill:
                self._stepped = each.rows
                continue
            self._turns.prompt(len(batch.seen), each.rows)
            self._planned = []
            if self.selector.plans_chunks or not each.is_partial_prefill:
                self._planned = self._turns.next(batch.sizes(each), beside=self._stepped)

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
        """Score a layer's tokens; store them now, or with all layers at the end of the pass.

        `unprojected` are keys and values as the model computes them, before any basis.
        """
        if self._unscored:
            self._store_unscored(batch, now, layer, (key, value))
            return
        once = self.selector.scores_once
        observed = Observed(
            *(unprojected if once else (key, value)),
            result,
            queries,
            stored=(key, value) if once and self.selector.rescore and now.is_prefill else None,
        )
        if not now.is_prefill:
            if self._observed and self._observed[-1].result.rescored != result.rescored:
                self._score_step(batch, now)
            self._steps.append(_Arrival(key, value))
            self._observed.append(observed)
            # Layers may rotate queries differently, and prefill in the same pass changes the
            # stores, which must be scored as they were attended to.
            alone = self._mixed or "queries" in self.selector.reads
            if alone or len(self._observed) * observed.tokens >= self._together(key.device):
                self._score_step(batch, now)
            return
        arrival = _Arrival(key, value)
        if self.selector.replay is not None:
            self._unread.append((arrival, observed.kept))
            return
        if self.selector.reads or self.selector.scores_once:
            self._arrive(batch, now, layer, arrival, observed)
            return
        self._unmet.append((arrival, observed.kept))
        if self.selector.scope == "layer" and self._are_enough(batch, layer, observed):
            self._score_together(batch, now, layer + 1 - len(self._unmet))

    def _are_enough(self, batch: Batch, layer: int, observed: Observed) -> bool:
        """Whether the layers up to this one are scored now, as the next would take more memory."""
        if layer == batch.shape.layers - 1 or not observed.tokens:
            return True
        count, new = len(self._unmet) + 1, observed.key.shape[:-1].numel()
        return count * new > _STORED_TOGETHER or count * observed.tokens > _TOGETHER

    def _score_together(self, batch: Batch, now: Pass, before: int = 0) -> None:
        """Score the prompts of the layers that wait, some at a time, the first of them `before`."""
        unmet, self._unmet = self._unmet, []
        if not unmet:
            return
        some = max(1, _TOGETHER // max(1, unmet[0][1].tokens))
        for first in range(0, len(unmet), some):
            arrivals, observed = zip(*unmet[first : first + some], strict=True)
            layer = before + first
            scored = score(self.selector, batch, now, layer, observed, self.shape)
            self._wrong += () if scored.wrong is None else (scored.wrong,)
            each = scored.by_layer(len(arrivals))
            self._arrived(batch, now, layer, [*map(_Arrival.scored_as, arrivals, each)])

    def _store_unscored(
        self,
        batch: Batch,
        now: Pass,
        layer: int,
        fresh: tuple[Float[Tensor, "B H L D"], Float[Tensor, "B H L Dv"]],
    ) -> None:
        """Store a layer's prompts until a later pass scores all of their tokens."""
        if layer == 0 and batch.pool.grows:
            batch.reserve((now.total - batch.window_size).clamp(min=0), spare=1)
        self._later.append(fresh)
        count, tokens = len(self._later), fresh[0].shape[:-1].numel()
        if layer < batch.shape.layers - 1 and count * tokens < _STORED_TOGETHER:
            return
        each, self._later = self._later, []
        key, value = (torch.cat(rows) for rows in zip(*each, strict=True))
        layers, over = slice(layer + 1 - count, layer + 1), now.over(count)
        scored = Scored.carried(loose_groups(batch, over, layers))
        plan = scored.split(stay([scored], over.total, batch.window_size)[0])
        enter(batch, now, layers, [Entry(key, value, scored, plan)])

    def _together(self, device: torch.device) -> int:
        wide = device.type != "cpu" and self.selector.running is not None
        return _TOGETHER_ON_DEVICE if wide else _TOGETHER

    def _arrive(
        self, batch: Batch, now: Pass, layer: int, arrival: _Arrival, observed: Observed
    ) -> None:
        """Score a layer's prompts, and plan them as `_arrived` does."""
        scored = score(self.selector, batch, now, layer, [observed], self.shape)
        self._wrong += () if scored.wrong is None else (scored.wrong,)
        self._arrived(batch, now, layer, [arrival.scored_as(scored)])

    def _arrived(self, batch: Batch, now: Pass, first: int, arrivals: Sequence[_Arrival]) -> None:
        """Plan the scored prompts of each layer, or of all layers at the end of the pass."""
        if self.selector.scope == "model":
            self._waiting += arrivals
            return
        for layer, arrival in enumerate(arrivals, first):
            self._plan_prompts(batch, now, layer, [arrival])

    def finish(self, batch: Batch, now: Pass, replayed: Sequence[Tensor] = ()) -> None:
        """Store the tokens that waited for all layers, or for the scores of their replay."""
        if now.is_prefill:
            unread, self._unread = self._unread, []
            for layer, (arrival, observed) in enumerate(unread):
                again = replace(observed, replayed=replayed[layer])
                self._arrive(batch, now, layer, arrival, again)
            self._score_together(batch, now)
            waiting, self._waiting = self._waiting, []
            wrong, self._wrong = self._wrong, []
            expect_numbers(self.selector, wrong)
            if waiting:
                self._plan_prompts(batch, now, 0, waiting)
            self._planned_all()
            batch.settle()
            return
        self._score_step(batch, now)
        steps, self._steps = self._steps, []
        taken, self._taken = self._taken, None
        if taken is None:
            taken = torch.stack([a.key for a in steps]), torch.stack([a.value for a in steps])
        self._decode(batch, now, *taken)

    def after(self, batch: Batch, stepped: tuple[int, ...] | None) -> None:
        """Count a pass, and plan those that are due of the sequences that decoded in it.

        Args:
            batch: the batch.
            stepped: these sequences; None: all.
        """
        if stepped == ():
            return
        self._turns.step(len(batch.seen), stepped)
        if not self._turns.waiting:
            return
        due = self._turns.next(batch.sizes(), among=stepped)
        if due:
            self._again(batch, due)
            if batch.pool.free > batch.pool.used:  # a delayed plan of a prompt freed most pages
                batch.settle()

    def compress(self, batch: Batch, pages: int | None = None) -> list[int]:
        """Plan sequences because pages are short; see `PolicyCache.compress`."""
        if not self.selector.replan.short:
            return []
        if pages is None:
            return sorted(i for some in self._short_of(batch, None) for i in some)
        tokens, until = batch.layout.tokens_of(pages), batch.pool.free + pages
        if sum(self._gains(batch, batch.sizes())) < tokens:
            return []
        planned: list[int] = []
        for some in self._short_of(batch, tokens):
            planned += some
            if batch.pool.free >= until:
                break
        return sorted(planned)

    def join(self, other: "KeepSelected") -> None:
        """Append the sequences of another batch; the prompts of both must be complete."""
        mine, theirs = (self._budget, self._thresholds), (other._budget, other._thresholds)
        assert mine[0] is not None, "budgets are resolved in the prefill"
        assert theirs[0] is not None, "budgets are resolved in the prefill"
        self._budget = torch.cat((mine[0], theirs[0]))
        if mine[1] is not None and theirs[1] is not None:
            self._thresholds = torch.cat((mine[1], theirs[1]), 2)
        if self.budgets is not None or other.budgets is not None:
            own = self.budgets or (None,) * len(mine[0])
            self.budgets = own + (other.budgets or (None,) * len(theirs[0]))
        self._turns.join(other._turns)

    def fix(self, batch: Batch) -> None:
        """Begin with vacant sequences, whose state stays where it is."""
        self._turns.fix(len(batch.seen))
        self._budget = torch.zeros_like(batch.seen)
        lead = (self.selector.tiers, *batch.stores[0].length.shape)
        self._thresholds = torch.zeros(lead, device=batch.seen.device)

    def adopt(self, sequence: int, other: "KeepAll | KeepSelected") -> None:
        """Let the only sequence of another batch take the place of a vacant one, in place."""
        assert isinstance(other, KeepSelected), "both have the same policy"
        assert self._budget is not None, "it is fixed"
        assert self._thresholds is not None, "they are fixed"
        assert other._budget is not None, "budgets are resolved in the prefill"
        self._budget[sequence] = other._budget[0]
        if other._thresholds is not None:
            self._thresholds[:, :, sequence] = other._thresholds[:, :, 0]
        self._set_budget(sequence, None if other.budgets is None else other.budgets[0])
        self._turns.adopt(sequence, other._turns)

    def clear(self, sequences: Collection[int]) -> None:
        """Let sequences be vacant."""
        for i in sequences:
            self._set_budget(i, None)
        self._turns.clear(sequences)

    def _set_budget(self, sequence: int, budget: Budget | None) -> None:
        if self.budgets is None and budget is None:
            return
        assert self._budget is not None, "it is fixed"
        own = [*(self.budgets or (None,) * len(self._budget))]
        own[sequence] = budget
        self.budgets = None if own.count(None) == len(own) else tuple(own)

    def abandon(self) -> None:
        """Drop the tokens of an unfinished decode pass."""
        self._steps, self._observed, self._fresh, self._taken = [], [], [], None

    def _again(self, batch: Batch, sequences: list[int]) -> None:
        """Plan the stored tokens of sequences again, by their stored scores or `rescore`."""
        with self.tally.timed():
            budget = self._resolve_again(batch, batch.seen, sequences)
            try:
                self._replan(batch, sequences, budget)
            except Exception as error:
                if self._careful is None or len(batch.seen) == 1:
                    raise
                self._replan_each(self._careful.errors, batch, sequences, budget, error)
        self._turns.done(sequences)
        self.tally.plans += 1

    def _replan(self, batch: Batch, sequences: list[int], budget: Int[Tensor, " B"]) -> None:
        last = None if self.selector.merge is None else self._merge_thresholds(batch)
        tier_thresholds = replan(self.selector, batch, sequences, budget, last)
        if tier_thresholds is not None:
            rows = torch.tensor(sequences, dtype=torch.long, device=tier_thresholds.device)
            self._keep_thresholds(batch, slice(None), rows, tier_thresholds)

    def _replan_each(
        self,
        errors: dict[int, Exception],
        batch: Batch,
        sequences: list[int],
        budget: Int[Tensor, " B"],
        error: Exception,
    ) -> None:
        """Plan each sequence separately; planning an already planned one again has no effect."""
        if len(sequences) == 1:
            errors[sequences[0]] = error
            return
        for i in sequences:
            try:
                self._replan(batch, [i], budget)
            except Exception as alone:
                errors[i] = alone

    def failures(self) -> dict[int, Exception]:
        """Return and clear the errors by sequence, if errors are isolated."""
        if self._careful is None:
            return {}
        found, self._careful.errors = self._careful.errors, {}
        return found

    def _short_of(self, batch: Batch, tokens: int | None) -> Iterator[list[int]]:
        """Plan sequences in groups that should each evict `tokens` tokens; all if None.

        KV-Compress, section 4.2.3: the sequence with the oldest plan is first.
        """
        done: set[int] = set()
        while True:
            sizes = batch.sizes()
            gains = [0 if i in done else n for i, n in enumerate(self._gains(batch, sizes))]
            chosen = self._turns.short(sizes, gains, tokens)
            if not chosen:
                return
            self._again(batch, chosen)
            done.update(chosen)
            yield chosen

    def _gains(self, batch: Batch, sizes: list[int]) -> list[int]:
        """Count each sequence's tokens above its budget, over layers and heads."""
        if self.selector.budget is None:  # only the plan determines how many are evicted
            return sizes
        heads = batch.shape.layers * batch.shape.kv_heads
        may = (self._resolve(batch, batch.seen) * heads).tolist()
        return [max(0, has - most) for has, most in zip(sizes, may, strict=True)]

    def _plan_prompts(
        self, batch: Batch, now: Pass, first: int, arrivals: Sequence[_Arrival]
    ) -> None:
        if not self._planned:  # unfinished prompts keep every token
            self._plan(batch, now, first, arrivals)
            return
        with self.tally.timed():
            self._plan(batch, now, first, arrivals)

    def _planned_all(self) -> None:
        self._turns.done(self._planned)
        self.tally.plans += bool(self._planned)

    def plans(self) -> Plans:
        """Return what is kept between passes beside the tokens, for `restore`."""
        return Plans(self._turns.counts(), self.budgets, self._budget, self._thresholds)

    def restore(self, plans: Plans, device: torch.device) -> None:
        """Continue from the plans of another batch with the same tokens."""
        self._turns.restore(plans.turns)
        self.budgets = plans.budgets
        self._budget, self._thresholds = (
            None if x is None else x.to(device, copy=True) for x in (plans.budget, plans.thresholds)
        )

    def branch(self, sequence: int, other: "KeepAll | KeepSelected") -> None:
        """Let the only sequence of another batch continue one of these."""
        assert isinstance(other, KeepSelected), "both have the same policy"
        assert self._budget is not None, "budgets are resolved in the prefill"
        device = self._budget.device
        other.restore(self.plans(), device)
        other.select(torch.tensor([sequence], device=device))

    def select(self, source: Int[Tensor, " B2"]) -> None:
        """Reorder budgets and turns with their sequences."""
        order = source.tolist()
        self._turns.select(order)
        if self.budgets is not None:
            self.budgets = tuple(self.budgets[i] for i in order)
        if self._budget is not None:
            self._budget = self._budget[source]
        if self._thresholds is not None:
            self._thresholds = self._thresholds[:, :, source]

    def _score_step(self, batch: Batch, now: Pass) -> None:
        """Score the layers attended in decode since the last call."""
        observed, self._observed = self._observed, []
        if not observed or not self._scores_steps:
            return
        first = len(self._steps) - len(observed)
        scored = score(self.selector, batch, now, first, observed, self.shape)
        fresh = scored.split(scored.score)[-1]
        self._fresh.append(fresh.unflatten(0, (len(observed), -1)))

    def _plan(self, batch: Batch, now: Pass, first: int, arrivals: Sequence[_Arrival]) -> None:
        """Plan some layers together; plans of as many as enter pages at once are applied."""
        if first == 0:
            budget = self._resolve_again(batch, now.total, self._planned)
            if batch.pool.grows and self.selector.budget is not None:
                batch.reserve(torch.minimum(now.total, budget), spare=1)
        assert self._budget is not None
        scored = [a.scored for a in arrivals if a.scored is not None]
        due = None
        if len(self._planned) < len(now.total):
            due = torch.tensor(self._planned, dtype=torch.long, device=now.total.device)
        plans, tier_thresholds = plan_layers(
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
        if tier_thresholds is not None:
            self._keep_thresholds(batch, slice(first, first + len(arrivals)), due, tier_thresholds)
        for arrival, one, plan in zip(arrivals, scored, plans, strict=True):
            self._decided.append((replace(arrival, scored=one.bare), plan))
        last, each = first + len(arrivals), arrivals[0].key.shape[:-1].numel()
        if last == batch.shape.layers or len(self._decided) * each >= _STORED_TOGETHER:
            decided, self._decided = self._decided, []
            self._apply(batch, now, last - len(decided), decided)

    def _apply(
        self,
        batch: Batch,
        now: Pass,
        first: int,
        decided: Sequence[tuple[_Arrival, _Plan]],
    ) -> None:
        """Apply the plans of some layers, and store their new tokens."""
        held = batch.pool.used
        rows = torch.tensor(self._planned, dtype=torch.long, device=now.total.device)
        entries: list[Entry] = []
        no_change: Sequence[Changed] = ()
        # All layers free pages before any takes some: the pages in use never exceed what is kept.
        for layer, (arrival, plan) in enumerate(decided, first):
            scored, changed = arrival.scored, no_change
            assert scored is not None  # planned
            if self.selector.merge is not None and self._planned:
                fresh = arrival.key, arrival.value
                changed = self._merge(batch, layer, fresh, scored, plan, now.total)
            entries.append(Entry(arrival.key, arrival.value, scored, plan, changed, rows))
        stored = sum(g.position.numel() for g in entries[0].scored.groups if g.store is not None)
        if batch.tiers.tiers == 1:
            stored = 0  # no token moves, which takes copies of their pages
        for some, of in _some_layers(first, entries, stored):
            restack_layers(batch, some, of)
        for some, of in _some_layers(first, entries, entries[0].key.shape[:-1].numel()):
            enter(batch, now, some, of)
        if first == 0 and batch.pool.grows and self.selector.budget is None:
            # Other layers need about as much, and growing once is cheaper than growing repeatedly.
            each = max(0, batch.pool.used - held) // len(decided)
            batch.pool.reserve(each * (batch.shape.layers - len(decided)))

    def _merge(
        self,
        batch: Batch,
        layer: int,
        fresh: tuple[Float[Tensor, "B H L D"], Float[Tensor, "B H L Dv"]],
        scored: Scored,
        plan: Sequence[UInt8[Tensor, "B H _"]],
        length: Int[Tensor, " B"],
    ) -> Sequence[Changed]:
        """Merge the tokens of a layer that are dropped after prompts into kept ones.

        Stored ones are rewritten; the result has all that change, by group.
        """
        rows = torch.tensor(self._planned, dtype=torch.long, device=length.device)
        where, scores = slice(layer, layer + 1), scored.split(scored.score)
        groups = [replace(g, score=s) for g, s in zip(scored.groups, scores, strict=True)]
        raw = batch.held_window
        loose = [] if raw is None else [(raw.keys(layer)[rows], raw.values(layer)[rows])]
        loose.append((fresh[0][rows], fresh[1][rows]))
        groups = with_vectors(batch, layer, groups, rows, loose)
        found, threshold = merged(
            self.selector,
            batch,
            layer,
            groups,
            [part[rows] for part in plan],
            length[rows],
            self._merge_thresholds(batch)[layer][rows],
        )
        each = threshold.expand(self.selector.tiers, 1, -1, -1)
        self._keep_thresholds(batch, where, rows, each)
        for group, change in zip(groups, found, strict=False):
            change.write(group, batch.table_rows(where, rows))
        return found

    def _merge_thresholds(self, batch: Batch) -> Float[Tensor, "N B H"]:
        """Return the thresholds of the last merges; 0 before the first."""
        if self._thresholds is None:
            return torch.zeros(batch.stores[0].length.shape, device=batch.seen.device)
        return self._thresholds[0]

    def _keep_thresholds(
        self, batch: Batch, layers: slice, due: Int[Tensor, " D"] | None, tier_thresholds: Tensor
    ) -> None:
        if self._thresholds is None:
            self._thresholds = tier_thresholds.new_zeros(
                len(tier_thresholds), *batch.stores[0].length.shape
            )
        self._thresholds[:, layers][:, :, slice(None) if due is None else due] = tier_thresholds

    def _resolve_again(
        self, batch: Batch, total: Int[Tensor, " B"], planned: list[int]
    ) -> Int[Tensor, " B"]:
        """Resolve the budgets of planned sequences, and of all on the first call."""
        found = self._resolve(batch, total)
        if self._budget is None:
            self._budget = found
        elif len(planned) < len(found):
            rows = torch.tensor(planned, dtype=torch.long, device=found.device)
            self._budget.index_copy_(0, rows, found[rows])
        else:
            self._budget.copy_(found)
        return self._budget

    def _resolve(self, batch: Batch, total: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
        return resolved(self.selector, self.budgets, total, batch.layout.token_bytes)

    def _decode(
        self,
        batch: Batch,
        now: Pass,
        key: Float[Tensor, "N B H 1 D"],
        value: Float[Tensor, "N B H 1 Dv"],
    ) -> None:
        """Store one new token per sequence, for all layers at once."""
        given, self._fresh = self._fresh, []
        if given:
            score = given[0] if len(given) == 1 else torch.cat(given)
        else:
            score = torch.zeros_like(key[..., 0], dtype=torch.float32)
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
            if not (self.selector.replan.short and self._make_room(batch, now, *rows)):
                raise

    def _store(self, batch: Batch, now: Pass, *rows: Tensor) -> None:
        """Store one token per head; if the pool lacks a page, nothing changes."""
        if self.selector.decode == "grow":
            batch.grow(*rows)
            return
        if self._budget is None:
            self._budget = self._resolve(batch, now.total)
        if self._thresholds is None:
            lead = (self.selector.tiers, *batch.stores[0].length.shape)
            self._thresholds = torch.zeros(lead, device=now.total.device)
        step(batch, self.selector, self._budget, self._thresholds, now, *rows)

    def _make_room(self, batch: Batch, now: Pass, *rows: Tensor) -> bool:
        """Plan sequences until a step's pages are free; return False if they never are."""
        for _ in self._short_of(batch, batch.layout.tokens_of(batch.a_page_each)):
            try:
                self._store(batch, now, *rows)
            except PoolExhausted:
                continue
            return True
        return False


def _some_layers(
    first: int, entries: Sequence[Entry], tokens: int
) -> Iterator[tuple[slice, Sequence[Entry]]]:
    """Give some layers at a time, of so many tokens each, with their entries."""
    some = max(1, _STORED_TOGETHER // max(1, tokens))
    for i in range(0, len(entries), some):
        of = entries[i : i + some]
        yield slice(first + i, first + i + len(of)), of
