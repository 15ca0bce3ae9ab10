"""Timing several ways to do the same, turn by turn."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from time import thread_time

Work = Callable[[], object]


@dataclass(frozen=True)
class Turns:
    """Seconds that each took, round by round."""

    seconds: Mapping[str, tuple[float, ...]]

    def median(self, name: str) -> float:
        """Of one, over the rounds."""
        return median(self.seconds[name])

    def quartiles(self, parts: tuple[str, ...], wholes: tuple[str, ...]) -> list[float]:
        """Of the sum of some over the sum of others in the same round; the median is the second.

        What else a machine does changes from round to round, and within one hardly.
        """
        pairs = zip(self._sums(parts), self._sums(wholes), strict=True)
        return quantiles((part / whole for part, whole in pairs), n=4, method="inclusive")

    def ratio(self, parts: tuple[str, ...], wholes: tuple[str, ...]) -> float:
        """The median of the same."""
        return self.quartiles(parts, wholes)[1]

    def _sums(self, names: tuple[str, ...]) -> list[float]:
        return [sum(each) for each in zip(*(self.seconds[name] for name in names), strict=True)]


def timed(
    work: Mapping[str, Work],
    rounds: int,
    repeats: int = 1,
    clock: Callable[[], float] = thread_time,
) -> Turns:
    """Do all of them `rounds` times in turn, each `repeats` times on end; the first two are unseen.

    Seconds are processor time of the calling thread, which does not go on while other programs have
    the core; torch must be set to one thread. For more threads give another `clock`.
    """
    spent: dict[str, list[float]] = {name: [] for name in work}
    for i in range(rounds + 2):
        for name, do in work.items():
            began = clock()
            for _ in range(repeats):
                do()
            if i >= 2:
                spent[name].append((clock() - began) / repeats)
    return Turns({name: tuple(each) for name, each in spent.items()})
