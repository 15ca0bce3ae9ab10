"""A search on a model: which policies fit, their windows of text, and hidden numbers at the end."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kv_eval.evaluate.intervals import of_change
from kv_eval.evaluate.journal import Finished, Journal
from kv_eval.evaluate.plan import Plan
from kv_eval.evaluate.report import Row, row_of, rows
from kv_eval.evaluate.runner import run, run_samples
from kv_eval.recommend.halving import SETTING, TASK, Arm, Halving, RunWindows, Standing, standing
from kv_eval.tasks import Sample, Text
from kv_policy import parse
from kv_transformers.capacity import Capacity, ModelMemory
from kv_transformers.from_text import FULL, MakeCache
from kv_transformers.measured import Found
from kv_transformers.recommend import Wish, capacities, within

if TYPE_CHECKING:
    from kv_transformers.models import LoadedModel

BATCH: Final = 8  # windows that run together
TRIES: Final = 4  # policies at most whose hidden numbers are measured


def fitting(
    loaded: "LoadedModel", specs: Sequence[str], wish: Wish, make: MakeCache
) -> tuple[dict[str, Capacity], dict[str, Capacity]]:
    """Return the bytes of the policies that fit, and of all that support the model.

    Args:
        loaded: the model.
        specs: text forms.
        wish: what must fit.
        make: creates a cache, or refuses the policy for this model.
    """
    found = {}
    for spec, capacity in capacities(
        ModelMemory.of(loaded.model), tuple(specs), wish.context
    ).items():
        fitted = parse(spec).fitted_to
        if fitted not in (None, loaded.fingerprint):
            continue
        try:
            make(loaded.model, spec)
        except ValueError:
            continue
        found[spec] = capacity
    return {spec: each for spec, each in found.items() if wish.fits(each)}, found


@dataclass(frozen=True, slots=True)
class TextSearch:
    """A search over policies by windows of a text.

    Attributes:
        loaded: the model.
        text: source of the windows.
        halving: the policies, and how far the search has come.
        length: tokens of a prompt.
        continuation: tokens scored after it.
        numbers: hidden numbers asked for in each task at the end; 0: none.
        later: whether their questions come after the prompt has been compressed.
    """

    loaded: "LoadedModel"
    text: Text
    halving: Halving
    length: int
    continuation: int
    numbers: int
    later: bool

    @property
    def plan(self) -> Plan:
        """The windows."""
        return Plan(
            policies=(FULL,),
            tasks=(TASK,),
            settings=(SETTING,),
            length=self.length,
            samples=self.halving.windows,
            batch=BATCH,
            continuation=self.continuation,
        )

    @property
    def total(self) -> int:
        """Samples to run at most, with those of the full cache."""
        return self.halving.total + 2 * 2 * self.numbers

    def windows(self) -> tuple[Sample, ...]:
        """Cut the windows, in an order in which the first few are from all over the text.

        Raises:
            TaskError: the text is too short, or the model reads less.
        """
        (samples,) = self.plan.made(self.loaded, self.text)
        order = random.Random(0).sample(range(len(samples)), len(samples))
        return tuple(samples[i] for i in order)

    def run(self, journal: Journal, make: MakeCache) -> Iterator[Finished]:
        """Search, then ask for numbers under the best policies until one is good.

        Yields every sample when it is finished.

        Raises:
            TaskError: the text is too short, or the model reads less.
        """
        some = self.runs(journal, make)
        yield from self.halving.run(some, journal)
        while len(self.halving.complete) < TRIES:
            before = self.halving.complete
            yield from self.halving.complete_next(some, journal)
            if self.halving.complete == before:
                return
            policy = self.halving.complete[-1].policy
            yield from self.ask(policy, journal, make)
            if self.good(policy, journal):
                return

    def runs(self, journal: Journal, make: MakeCache) -> RunWindows:
        """Return what runs windows that the journal does not have yet.

        Raises:
            TaskError: the text is too short, or the model reads less.
        """
        windows = self.windows()

        def some(policies: Sequence[str], numbers: range) -> Iterator[Finished]:
            chosen, first = windows[numbers.start : numbers.stop], numbers.start
            return run_samples(self.loaded, policies, chosen, journal, make, BATCH, first=first)

        return some

    def good(self, policy: str, journal: Journal) -> bool:
        """Return whether a complete policy loses no more than is asked, and no numbers."""
        loss, arm = self.halving.loss, Arm(policy, 0)
        interval = standing(journal, arm, self.halving.read).interval
        within_loss = loss is None or (interval is not None and within(interval, loss))
        return within_loss and not any(found.lost for found in self.found(policy, journal))

    def asked(self, policy: str) -> Plan | None:
        """Return the plan of hidden numbers for a policy; None: none are measured."""
        if not self.numbers:
            return None
        return Plan(
            policies=(FULL, policy),
            tasks=("needle", "multikey"),
            settings=("agnostic" if self.later else "aware",),
            length=self.length,
            samples=self.numbers,
        )

    def ask(self, policy: str, journal: Journal, make: MakeCache) -> Iterator[Finished]:
        """Ask for hidden numbers under a policy; yield every sample when it is finished.

        Raises:
            TaskError: the length is too small for the wording.
        """
        plan = self.asked(policy)
        if plan is not None:
            yield from run(self.loaded, plan, self.text, journal, make)

    def found(self, policy: str, journal: Journal) -> tuple[Found, ...]:
        """Count the hidden numbers that were found under a policy."""
        plan = self.asked(policy)
        return () if plan is None else tuple(_counted(plan, policy, journal))

    def standings(self, journal: Journal) -> list[Standing]:
        """Summarize every policy that has read a window."""
        return [
            standing(journal, arm)
            for arm in self.halving.arms
            if journal.get(arm.policy, TASK, SETTING, 0) is not None
        ]

    def rows(self, journal: Journal) -> Iterator[Row]:
        """Summarize all samples as rows of a result of `kv-serve eval`."""
        every = [FULL, *(arm.policy for arm in self.halving.arms)]
        for policy in every:
            both = list(_both(journal, policy))
            if both:
                mine, full = zip(*both, strict=True)
                yield row_of(mine, full, self.length, 0)
        for i, arm in enumerate(self.halving.complete):
            plan = self.asked(arm.policy)
            found = () if plan is None else rows(plan, journal)
            yield from (row for row in found if i == 0 or row.policy != FULL)


def _both(journal: Journal, policy: str) -> Iterator[tuple[Finished, Finished]]:
    number = 0
    while True:
        mine, full = (journal.get(each, TASK, SETTING, number) for each in (policy, FULL))
        if mine is None or full is None:
            return
        yield mine, full
        number += 1


def _counted(plan: Plan, policy: str, journal: Journal) -> Iterator[Found]:
    for task, setting in plan.pairs:
        scores: list[list[float]] = []
        for spec in (policy, FULL):
            done = [journal.get(spec, task, setting, i) for i in range(plan.each)]
            scores.append([entry.score for entry in done if entry is not None])
        change = of_change(*scores)
        yield Found(
            task=task,
            setting=setting,
            samples=plan.each,
            found=round(sum(scores[0])),
            full_found=round(sum(scores[1])),
            change=(-1.0, 1.0) if change is None else change,
        )
