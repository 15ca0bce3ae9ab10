"""Bytes, needle and nats of several policies, and how they are written to one result.

Cells are needle, with the question after the compressed prompt (`agnostic`) and inside it
(`aware`), and nats per token of the text that follows a compressed prompt. Bytes are those that a
cache holds after the prompt, by its own accounting, over those of an uncompressed cache of two
bytes per number. Prompts are of the default text.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import _result
from _evaluation import CONSOLE, cells, evaluated
from _heads import head_scores

from kv_eval.calibrate.random_tokens import RandomTokens
from kv_eval.evaluate.plan import Plan
from kv_eval.tasks import Setting
from kv_policy import parse
from kv_transformers.from_text import FULL
from kv_transformers.models import LoadedModel, load_model

TOGETHER: Final = 32  # caches of a prompt that are held at once
LENGTH: Final = 2000
SETTINGS: Final[tuple[Setting, ...]] = ("agnostic", "aware")
Row = dict[str, object]


@dataclass(frozen=True)
class Size:
    """How much is run."""

    length: int
    samples: int
    batch: int
    continuation: int
    drawn: RandomTokens


def full_size(samples: int) -> Size:
    """What the committed figures come from."""
    return Size(LENGTH, samples, 8, 64, RandomTokens())


def quick_size() -> Size:
    """A smoke run: the same steps on very little."""
    return Size(300, 1, 1, 8, RandomTokens(period=64, windows=1))


def specs(size: Size, policies: Mapping[str, str], file: Path) -> dict[str, str]:
    """Name the policies as the evaluation does; budgets shrink with the prompt."""
    found = {}
    for name, policy in policies.items():
        text = policy.replace("FILE", str(file))
        for tokens in (1080, 1024):
            text = text.replace(f"budget={tokens}", f"budget={tokens * size.length // LENGTH}")
        found[name] = str(parse(text))
    return found


def plans(size: Size, policies: Sequence[str], settings: Sequence[Setting]) -> dict[str, Plan]:
    """The plan of each part."""
    named = (FULL, *policies)
    needle = Plan(named, ("needle",), tuple(settings), size.length, samples=size.samples, seed=4242)
    nats = Plan(
        named,
        ("nll",),
        ("agnostic",),
        size.length,
        samples=size.samples,
        seed=4242,
        batch=size.batch,
        continuation=size.continuation,
    )
    return {"needle": needle, "nll": nats}


def summarize(rows: Sequence[Row]) -> dict[str, float]:
    """The figures that a document may quote."""
    figures: dict[str, float] = {}
    for row in rows:
        aware = "aware_" if row["setting"] == "aware" else ""
        task = "nats" if row["task"] == "nll" else row["task"]
        figures[f"{aware}{task}_{row['name']}"] = float(str(row["mean"]))
    for row in rows:
        if row["name"] != FULL and row["task"] == "nll":
            figures[f"bytes_{row['name']}"] = float(str(row["bytes"]))
    return figures


def scores_of_heads(loaded: LoadedModel, file: Path, size: Size) -> None:
    """Write the scores of a model's heads."""
    head_scores(loaded, file, size.drawn)


def run(
    name: str,
    about: str | None,
    policies: Mapping[str, str],
    quick: Sequence[str],
    calibrate: Callable[[LoadedModel, Path, Size], None] = scores_of_heads,
    settings: Sequence[Setting] = SETTINGS,
) -> None:
    """Run all cells of the policies and write the result; an interrupted run is resumed.

    Args:
        name: the result's name.
        about: the help of the command.
        policies: each policy under its name; FILE stands for a file of the model's.
        quick: the names of those that a smoke run takes.
        calibrate: writes that file.
        settings: of the needle's question.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    parser.add_argument("--samples", type=int, default=32, help="prompts of a cell")
    given = parser.parse_args()
    size = quick_size() if given.quick else full_size(given.samples)
    if given.quick:
        policies = {each: policies[each] for each in quick}
    loaded = load_model(progress=CONSOLE.print)
    end = ".quick" if given.quick else ""
    file = _result.RESULTS / f"{name}.model{end}.statistics"
    if any("FILE" in each for each in policies.values()) and (given.quick or not file.exists()):
        calibrate(loaded, file, size)
    names, rows, journals = specs(size, policies, file), [], []
    for part, plan in plans(size, list(names.values()), settings).items():
        journal = evaluated(loaded, plan, f"{name}.{part}{end}", together=TOGETHER)
        found = cells(loaded, plan, journal, {spec: name for name, spec in names.items()})
        rows += [row | {"policy": str(row["policy"]).replace(str(file), "F")} for row in found]
        journals.append(journal)
    summary = summarize(rows)
    for each, value in summary.items():
        print(f"{each:32} {value:.4f}")
    _result.write(name, summary, rows, quick=given.quick)
    for journal in journals:
        journal.remove()
