"""Number and duration of compression plans."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Plans of the caches that share this tally.

    A plan covers some sequences and all layers: after their prompt, or again later. A policy that
    replaces single tokens in each decode step does that without a plan.
    """

    plans: int = 0
    seconds: float = 0.0  # host time of planning and moving tokens; a GPU may still be running

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the duration of the block."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begun
