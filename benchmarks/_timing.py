"""Timing several ways to do the same, turn by turn, on one thread."""

from collections.abc import Callable, Mapping
from statistics import median
from time import thread_time

Work = Callable[[], object]


def medians(work: Mapping[str, Work], rounds: int, repeats: int = 1) -> dict[str, float]:
    """Seconds of processor time that each takes, the median of `rounds` after two without a clock.

    Every round does all of them, each `repeats` times on end. It is the calling thread's own time,
    which does not go on while other programs have the core; torch must be set to one thread.
    """
    spent: dict[str, list[float]] = {name: [] for name in work}
    for i in range(rounds + 2):
        for name, do in work.items():
            began = thread_time()
            for _ in range(repeats):
                do()
            if i >= 2:
                spent[name].append((thread_time() - began) / repeats)
    return {name: median(each) for name, each in spent.items()}
