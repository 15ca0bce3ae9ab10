"""What the search of `kv-serve recommend --measure` finds, beside the best of its whole grid.

SmolLM2-135M reads windows of Python's help topics under every policy of the grid, and the search
runs over these samples. At each budget, a share of the full cache's bytes, only policies that fit
are searched, for the least loss: `gap` is the nats per token of the policy it ends at over those of
the best of the grid, window by window, `gap_upper` the upper end of its 95 % interval, and `spent`
the windows it read over those of the whole grid. `bytes_over_smallest` is of the other goal, the
fewest bytes at a loss of at most `LOSS`: the bytes it ends at over those of the smallest policy
whose interval ends at no more than that. Finished samples are in `recommend.partial` beside the
results; a later run resumes from them.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import _result
import torch
from _evaluation import CONSOLE
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kv_eval.evaluate.intervals import of_change
from kv_eval.evaluate.journal import Finished, Journal, open_journal
from kv_eval.evaluate.runner import run_samples
from kv_eval.recommend.grid import grid
from kv_eval.recommend.halving import SETTING, TASK, Arm, Halving, standing
from kv_eval.recommend.search import BATCH, TRIES, TextSearch, fitting
from kv_eval.tasks import Sample, default_text
from kv_policy import parse
from kv_transformers.capacity import ModelMemory
from kv_transformers.from_text import FULL, caches_of
from kv_transformers.models import LoadedModel, load_model
from kv_transformers.recommend import Wish, within

# Methods of the grid, beside formats alone: a search over all would take a day.
METHODS: Final = ("kv-compress", "snapkv", "expected-attention", "keydiff", "streaming")
BUDGETS: Final = {"40": 0.4, "25": 0.25, "12": 0.125}  # of the full cache's bytes
LOSS: Final = 0.02
TOGETHER: Final = 16  # caches of a prompt that are held at once

Row = dict[str, object]


@dataclass(frozen=True)
class Size:
    """How much is run."""

    length: int
    continuation: int
    windows: int
    policies: int  # of the grid at most


LARGE: Final = Size(1000, 32, 32, 1000)
QUICK: Final = Size(400, 4, 4, 24)


def chosen(size: Size) -> tuple[str, ...]:
    """Return the text forms of the grid."""
    found = [
        spec
        for spec in grid()
        if spec.partition(":")[0].partition("+")[0] in METHODS or not _selects(spec)
    ]
    step = max(1, len(found) // size.policies)
    return tuple(found[::step][: size.policies])


def _selects(spec: str) -> bool:
    return parse(spec).selector is not None


def measured(made: TextSearch, journal: Journal) -> None:
    """Run every window under every policy, in the batches of the search."""
    make, windows = caches_of(made.loaded), made.windows()
    policies = [FULL, *(arm.policy for arm in made.halving.arms)]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=CONSOLE) as progress:
        bar = progress.add_task("samples", total=len(policies) * len(windows))
        before = 0
        for until in made.halving.rounds:
            some: tuple[Sample, ...] = windows[before:until]
            for entry in run_samples(
                made.loaded,
                policies,
                some,
                journal,
                make,
                BATCH,
                first=before,
                together=TOGETHER,
            ):
                progress.update(bar, advance=1, description=entry.policy)
            before = until


def searched(
    arms: Sequence[Arm], journal: Journal, windows: int, loss: float | None
) -> tuple[Halving, Arm]:
    """Search among finished samples; return the search and the policy it ends at."""

    def known(policies: Sequence[str], numbers: range) -> Iterator[Finished]:
        for policy in policies:
            for i in numbers:
                entry = journal.get(policy, TASK, SETTING, i)
                assert entry is not None
                yield entry

    halving = Halving(tuple(arms), windows, loss, precision=math.inf)  # until one is left
    for _ in halving.run(known, journal):
        pass
    while loss is not None and len(halving.complete) < TRIES:
        for _ in halving.complete_next(known, journal):
            pass
        best = halving.finalists(journal)[0]
        if best.interval is not None and within(best.interval, loss):
            break
    return halving, halving.finalists(journal)[0].arm


def nats(journal: Journal, policy: str, windows: int) -> list[float]:
    """Return the nats per token of each window."""
    found = [journal.get(policy, TASK, SETTING, i) for i in range(windows)]
    return [entry.score for entry in found if entry is not None]


def budget_row(
    name: str, arms: Sequence[Arm], full_bytes: int, journal: Journal, windows: int
) -> Row:
    """Search at a budget, and compare with the best of the grid."""
    fit = [arm for arm in arms if arm.request_bytes <= BUDGETS[name] * full_bytes]
    assert fit, f"no policy holds at most {name} % of the bytes"
    halving, arm = searched(fit, journal, windows, None)
    full = nats(journal, FULL, windows)
    mine = nats(journal, arm.policy, windows)
    best = min(fit, key=lambda each: (fmean(nats(journal, each.policy, windows)), each.policy))
    other = nats(journal, best.policy, windows)
    return {
        "kind": "budget",
        "budget": BUDGETS[name],
        "policies": len(fit),
        "found": arm.policy,
        "best": best.policy,
        "loss": fmean(mine) - fmean(full),
        "best_loss": fmean(other) - fmean(full),
        "gap": fmean(mine) - fmean(other),
        "gap_interval": of_change(mine, other),
        "spent": halving.spent / (len(fit) * windows),
    }


def smallest_row(arms: Sequence[Arm], journal: Journal, windows: int) -> Row:
    """Search for the fewest bytes at a loss, and compare with the smallest of the grid."""
    halving, arm = searched(arms, journal, windows, LOSS)
    every = [standing(journal, each, windows) for each in arms]
    good = [each for each in every if each.interval is not None and within(each.interval, LOSS)]
    smallest = min(good, key=lambda s: (s.arm.request_bytes, s.arm.policy), default=None)
    mine = standing(journal, arm, windows)
    return {
        "kind": "smallest",
        "loss_asked": LOSS,
        "policies": len(arms),
        "found": arm.policy,
        "found_loss": mine.loss,
        "found_interval": mine.interval,
        "smallest": None if smallest is None else smallest.arm.policy,
        "bytes_ratio": (
            None if smallest is None else arm.request_bytes / smallest.arm.request_bytes
        ),
        "spent": halving.spent / (len(arms) * windows),
    }


def policy_rows(
    arms: Sequence[Arm], full_bytes: int, journal: Journal, size: Size
) -> Iterator[Row]:
    """Yield the nats of every policy."""
    for policy, held in ((FULL, full_bytes), *((arm.policy, arm.request_bytes) for arm in arms)):
        yield {
            "kind": "policy",
            "policy": policy,
            "length": size.length,
            "continuation": size.continuation,
            "bytes": held / full_bytes,
            "nats": nats(journal, policy, size.windows),
        }


def summarize(rows: Sequence[Row]) -> dict[str, float]:
    """The figures that a document may quote."""
    figures: dict[str, float] = {}
    for name, share in BUDGETS.items():
        for row in rows:
            if row["kind"] == "budget" and row["budget"] == share:
                interval = row["gap_interval"]
                assert isinstance(interval, tuple)
                figures[f"gap_{name}"] = float(str(row["gap"]))
                figures[f"gap_upper_{name}"] = interval[1]
                figures[f"loss_{name}"] = float(str(row["loss"]))
                figures[f"best_loss_{name}"] = float(str(row["best_loss"]))
                figures[f"spent_{name}"] = float(str(row["spent"]))
    for row in rows:
        if row["kind"] == "smallest":
            figures["spent_smallest"] = float(str(row["spent"]))
            if row["bytes_ratio"] is not None:
                figures["bytes_over_smallest"] = float(str(row["bytes_ratio"]))
    return figures


def search_of(loaded: LoadedModel, size: Size) -> tuple[TextSearch, int]:
    """Return the search over the whole grid, and the bytes of an uncompressed request."""
    make = caches_of(loaded)
    wish = Wish(size.length)
    fit, _ = fitting(loaded, chosen(size), wish, make)
    arms = tuple(Arm(spec, capacity.request_bytes) for spec, capacity in fit.items())
    halving = Halving(arms, size.windows)
    made = TextSearch(
        loaded, default_text(), halving, size.length, size.continuation, numbers=0, later=False
    )
    return made, ModelMemory.of(loaded.model).stock(size.length).request_bytes


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    quick = parser.parse_args().quick
    size = QUICK if quick else LARGE
    loaded = load_model(progress=CONSOLE.print)
    torch.set_num_threads(1)
    made, full_bytes = search_of(loaded, size)
    arms = made.halving.arms
    CONSOLE.print(f"{len(arms):,} policies")
    path = _result.RESULTS / f"recommend{'.quick' if quick else ''}.partial"
    journal, sentence = open_journal(path, made.plan.identity(loaded, made.text))
    if sentence:
        CONSOLE.print(sentence)
    measured(made, journal)
    rows: list[Row] = [*policy_rows(arms, full_bytes, journal, size)]
    rows += [budget_row(name, arms, full_bytes, journal, size.windows) for name in BUDGETS]
    rows.append(smallest_row(arms, journal, size.windows))
    summary = summarize(rows)
    for name, value in summary.items():
        print(f"{name:28} {value:.5f}")
    _result.write("recommend", summary, rows, quick=quick)
    journal.remove()


if __name__ == "__main__":
    main()
