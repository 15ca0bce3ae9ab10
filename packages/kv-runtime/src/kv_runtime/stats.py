"""How often caches planned what stays, and how long that took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """What the caches that share it did so far.

    A plan is one over some sequences, for all layers: after their prompt, or again later. A policy
    that replaces single tokens as others come does that in every step, and it is no plan.
    """

    plans: int = 0
    seconds: float = 0.0  # of the host, to plan and to move tokens; a GPU may still be at it

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of what is done inside."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begun
