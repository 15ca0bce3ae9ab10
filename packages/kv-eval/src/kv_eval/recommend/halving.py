"""Successive halving: few windows of text for every policy, more for those that do well.

Jamieson and Talwalkar (2016, https://arxiv.org/abs/1502.07943) halve the candidates and double the
samples; here a third is kept, for three times as many windows. Where fewest bytes are sought, the
first rounds keep the frontiers of bytes and loss, one after the other, as in multi-objective
variants (Schmucker et al., 2021, https://arxiv.org/abs/2106.12639).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

from kv_eval.evaluate.intervals import Interval, of_change
from kv_eval.evaluate.journal import Finished, Journal
from kv_eval.report.frontier import pareto
from kv_transformers.from_text import FULL
from kv_transformers.recommend import within

TASK: Final = "nll"
SETTING: Final = "agnostic"
THIRD: Final = 3
LEAST: Final = 8  # windows; with fewer, divergences rank better than differences of nats

# Runs policies on windows of these numbers, `full` included, skipping what is finished.
RunWindows = Callable[[Sequence[str], range], Iterator[Finished]]


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy that is tried, and the bytes of a request under it."""

    policy: str
    request_bytes: int


@dataclass(frozen=True, slots=True)
class Standing:
    """A policy after some windows.

    Attributes:
        arm: the policy.
        windows: how many.
        loss: mean of nats per token over the full cache's, window by window.
        interval: its 95 % interval; None: a single window.
        divergence: mean over the windows, in nats per token, from the full cache's distributions.
    """

    arm: Arm
    windows: int
    loss: float
    interval: Interval | None
    divergence: float

    @property
    def precision(self) -> float:
        """Half the width of the interval."""
        return float("inf") if self.interval is None else (self.interval[1] - self.interval[0]) / 2

    def place(self, quality: float) -> tuple[float, float]:
        """Return the bytes beside a quality."""
        return float(self.arm.request_bytes), quality


@dataclass
class Halving:
    """A search, as far as it has come.

    Attributes:
        arms: the policies.
        windows: how many are read at most.
        loss: sought are the fewest bytes at no more than this loss in nats per token; None: sought
            is the least loss.
        precision: the search ends when one policy is left and half of its interval is no wider.
        alive: the policies that are left.
        complete: those that `complete_next` has chosen, in order.
        read: windows that both have read.
        spent: windows that policies have read in all, without those of the full cache.
    """

    arms: tuple[Arm, ...]
    windows: int = 32
    loss: float | None = None
    precision: float = 0.0
    alive: tuple[Arm, ...] = field(init=False)
    complete: tuple[Arm, ...] = field(init=False, default=())
    read: int = field(init=False, default=0)
    spent: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Start with all policies.

        Raises:
            ValueError: no policy, or fewer than two windows, which give no interval.
        """
        if not self.arms:
            raise ValueError("a search needs at least one policy that fits")
        if self.windows < 2:
            raise ValueError(f"windows is {self.windows}; an interval needs at least 2")
        self.alive = self.arms

    @property
    def rounds(self) -> tuple[int, ...]:
        """Windows read by the end of each round."""
        found = [1]
        while found[-1] * THIRD < self.windows:
            found.append(found[-1] * THIRD)
        return (*found, self.windows)

    @property
    def total(self) -> int:
        """Samples to run at most, with those of the full cache."""
        left, before, count = len(self.arms), 0, 0
        for until in self.rounds:
            count += (left + 1) * (until - before)
            left, before = max(1, left // THIRD), until
        return count

    def run(self, run: RunWindows, journal: Journal) -> Iterator[Finished]:
        """Search; yield every sample when it is finished, or known from the journal."""
        for until in self.rounds:
            policies = [arm.policy for arm in self.alive]
            yield from run([FULL, *policies], range(self.read, until))
            self.spent += len(policies) * (until - self.read)
            self.read = until
            found = [standing(journal, arm, until) for arm in self.alive]
            narrow = found[0].precision <= self.precision and until >= LEAST
            if until == self.windows or (len(found) == 1 and narrow):
                return
            best = ranked(found, self.loss)[: max(1, len(found) // THIRD)]
            self.alive = tuple(each.arm for each in best)

    def complete_next(self, run: RunWindows, journal: Journal) -> Iterator[Finished]:
        """Choose the next best policy after `run`, and let it read as many windows as the best.

        First come the policies that are left, then those that left last. `complete` grows by the
        policy, unless there is none.
        """
        arm = next((arm for arm in self._order(journal) if arm not in self.complete), None)
        if arm is None:
            return
        starts = [0, *(each for each in self.rounds if each < self.read)]
        for start, until in zip(starts, [*starts[1:], self.read], strict=True):
            if journal.get(arm.policy, TASK, SETTING, until - 1) is None:
                self.spent += until - start
                yield from run([FULL, arm.policy], range(start, until))
        self.complete += (arm,)

    def finalists(self, journal: Journal) -> list[Standing]:
        """Return the complete policies, or those that are left, best first."""
        return [
            standing(journal, arm, self.read)
            for arm in self._order(journal)
            if arm in (self.complete or self.alive)
        ]

    def _order(self, journal: Journal) -> list[Arm]:
        """Return the policies that read most, best first.

        With a loss, those whose interval ends at no more than it come first, fewest bytes first;
        all others are in the order of their loss.
        """
        read = [each for each in self.arms if journal.get(each.policy, TASK, SETTING, 0)]
        found = [standing(journal, arm) for arm in read]
        return [each.arm for each in sorted(found, key=self._preference)]

    def _preference(self, found: Standing) -> tuple[int, bool, float, float, str]:
        good = (
            self.loss is not None
            and found.interval is not None
            and within(found.interval, self.loss)
        )
        held = float(found.arm.request_bytes)
        least = held if good else found.loss
        return -min(found.windows, self.read), not good, least, held, found.arm.policy


def standing(journal: Journal, arm: Arm, windows: int | None = None) -> Standing:
    """Summarize the samples of a policy.

    Args:
        journal: has them, and those of the full cache.
        arm: the policy.
        windows: the first so many; None: all that the policy has read in order.
    """
    pairs = list(_pairs(journal, arm.policy, windows))
    mine, full = ([each.score for each in one] for one in zip(*pairs, strict=True))
    apart = [fmean(each.divergences) for each, _ in pairs]
    changes = [a - b for a, b in zip(mine, full, strict=True)]
    return Standing(arm, len(pairs), fmean(changes), of_change(mine, full), fmean(apart))


def ranked(found: Sequence[Standing], loss: float | None) -> list[Standing]:
    """Order policies by how much they deserve more windows.

    With a loss, those that exceed it least come first, and of those that do not exceed it the ones
    with fewest bytes. After few windows, frontiers of bytes and divergence come one after another,
    each in that order.
    """
    few = min(each.windows for each in found) < LEAST
    if loss is None:
        return sorted(found, key=lambda s: (s.divergence if few else s.loss, *_least(s)))
    ordered = sorted(found, key=lambda s: (max(0.0, s.loss - loss), *_least(s)))
    if not few:
        return ordered
    layers: list[Standing] = []
    while ordered:
        on = pareto([each.place(each.divergence) for each in ordered], lower=True)
        layers += [each for each, best in zip(ordered, on, strict=True) if best]
        ordered = [each for each, best in zip(ordered, on, strict=True) if not best]
    return layers


def frontier(found: Sequence[Standing]) -> list[Standing]:
    """Return the policies that no other beats in bytes and loss, fewest bytes first."""
    on = pareto([each.place(each.loss) for each in found], lower=True)
    best = [each for each, is_best in zip(found, on, strict=True) if is_best]
    return sorted(best, key=lambda each: (each.arm.request_bytes, each.loss, each.arm.policy))


def _least(found: Standing) -> tuple[int, str]:
    return found.arm.request_bytes, found.arm.policy


def _pairs(
    journal: Journal, policy: str, windows: int | None
) -> Iterator[tuple[Finished, Finished]]:
    number = 0
    while windows is None or number < windows:
        mine = journal.get(policy, TASK, SETTING, number)
        full = journal.get(FULL, TASK, SETTING, number)
        if mine is None or full is None:
            return
        yield mine, full
        number += 1
