"""The greatest rate of a policy that loses no more than allowed, found by halving."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kv_eval.calibrate.search import Point, Search
from kv_eval.evaluate.journal import Finished, Journal
from kv_eval.tasks import Text
from kv_transformers.from_text import FULL, MakeCache, make_cache

if TYPE_CHECKING:
    from kv_transformers.models import LoadedModel

LEVELS: Final = 63  # six halvings


@dataclass(frozen=True, slots=True)
class Rate:
    """A share of the cache that a calibrated policy removes."""

    policy: str
    file: Path
    rate: float

    @property
    def spec(self) -> str:
        """The policy's text form, as `parse` gives it back."""
        file = re.sub(r"[\\+,]|^\s|\s\Z", r"\\\g<0>", str(self.file))
        return f"{self.policy}:file={file},rate={self.rate}"


@dataclass
class RateSearch:
    """Rates that could be, of which half are left after each one that is tried.

    A greater rate is taken to lose no less: tasks of few samples may say otherwise by chance, and
    then the rate that is found is one that was tried and good, not always the greatest there is.
    """

    policy: str
    file: Path  # what calibration wrote
    levels: tuple[float, ...]  # rates that can be had, rising
    samples: Search[Rate]  # tasks and their samples; its settings are not used
    allowed: float  # share of the full cache's score that each task may lose
    tried: list[Point[Rate]] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Samples to finish at most, those of the full cache left out."""
        return len(self.levels).bit_length() * len(self.samples.tasks) * self.samples.samples

    @property
    def found(self) -> Point[Rate] | None:
        """The greatest rate that was tried and good."""
        good = [point for point in self.tried if point.within(self.allowed)]
        return max(good, key=lambda point: point.setting.rate, default=None)

    def run(
        self, loaded: "LoadedModel", text: Text, journal: Journal, make: MakeCache = make_cache
    ) -> Iterator[Finished]:
        """Try rates until no two are left; give each sample as it is there.

        Raises:
            TaskError: a task cannot be made, or is longer than the model reads.
            ValueError: the policy is refused for this model.
        """
        low, high = 0, len(self.levels)  # what is below low is good, from high on it is not
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
