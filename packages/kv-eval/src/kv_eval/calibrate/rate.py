"""Bisection for the highest rate of a policy within an allowed loss."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kv_eval.calibrate.search import Point, Search
from kv_eval.evaluate.journal import Finished, Journal
from kv_eval.tasks import Text
from kv_transformers.from_text import FULL, MakeCache

if TYPE_CHECKING:
    from kv_transformers.models import LoadedModel

LEVELS: Final = 63  # six bisection steps


@dataclass(frozen=True, slots=True)
class Rate:
    """A share of the cache that a calibrated policy removes."""

    policy: str
    file: Path
    rate: float

    @property
    def spec(self) -> str:
        """The policy's canonical text form."""
        file = re.sub(r"[\\+,]|^\s|\s\Z", r"\\\g<0>", str(self.file))
        return f"{self.policy}:file={file},rate={self.rate}"


@dataclass
class RateSearch:
    """Bisection over candidate rates.

    A higher rate is assumed to lose no less. With few samples this may not hold by chance; the
    result is then a rate that was tried and passed, but not always the highest such rate.
    """

    policy: str
    file: Path  # the output of calibration
    levels: tuple[float, ...]  # candidate rates, ascending
    samples: Search[Rate]  # tasks and their samples; its settings are ignored
    allowed: float  # loss allowed per task, as a share of the full cache's score
    tried: list[Point[Rate]] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Maximum number of samples to run, without those of the full cache."""
        return len(self.levels).bit_length() * len(self.samples.tasks) * self.samples.samples

    @property
    def found(self) -> Point[Rate] | None:
        """The highest rate that passed."""
        good = [point for point in self.tried if point.within(self.allowed)]
        return max(good, key=lambda point: point.setting.rate, default=None)

    def run(
        self, loaded: "LoadedModel", text: Text, journal: Journal, make: MakeCache | None = None
    ) -> Iterator[Finished]:
        """Try rates until the search converges; yield each sample when it is finished.

        Raises:
            TaskError: a task cannot be created, or exceeds the model's context length.
            ValueError: the policy does not support this model.
        """
        low, high = 0, len(self.levels)  # below low all pass, from high on all fail
        while low < high:
            middle = (low + high) // 2
            setting = Rate(self.policy, self.file, self.levels[middle])
            trial = replace(self.samples, settings=(setting,))
            for entry in trial.run(loaded, text, journal, make):
                if entry.policy != FULL:
                    yield entry
            (point,) = trial.points(journal)
            self.tried.append(point)
            if point.within(self.allowed):
                low = middle + 1
            else:
                high = middle
