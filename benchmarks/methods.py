"""The later methods and formats at their usual settings, and at a quarter of the bytes.

Cells are needle, with the question after the compressed prompt (`agnostic`) and inside it
(`aware`), and nats per token of the text that follows a compressed prompt. Bytes are those that a
cache holds after the prompt, by its own accounting, over those of an uncompressed cache of two
bytes per number. Each method is measured as it is by default, without a format (`NAME_usual`), and
with k8v4 such that it holds about a quarter of the bytes (`NAME_25`), beside kv-compress. A method
without a budget holds what its rule keeps: the share of heads that retrieve, and the threshold of
`simlayerkv`, are then set so that prompts of 2,000 tokens come near to a quarter.

Prompts are of the default text. Scores of heads are of random tokens, so no prompt was read in
calibration. They are written to `results/methods.heads.statistics`, which a later run reads again.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import _result
from _evaluation import CONSOLE, cells, evaluated
from _heads import head_scores

from kv_eval.calibrate.random_tokens import RandomTokens
from kv_eval.evaluate.plan import Plan
from kv_policy import parse
from kv_transformers.from_text import FULL
from kv_transformers.models import load_model

TOGETHER: Final = 32  # caches of a prompt that are held at once
LENGTH: Final = 2000
Row = dict[str, object]

# FILE: the scores of heads. In k8v4, 1,080 tokens per head of 2,000 take a quarter of the bytes.
POLICIES: Final[Mapping[str, str]] = {
    "kv_compress_25": "kv-compress:budget=1080+k8v4",
    "razor_usual": "razor:file=FILE",
    "razor_25": "razor:file=FILE,share=0.41+k8v4",
    "duo_usual": "duo:file=FILE",
    "duo_25": "duo:file=FILE,share=0.43+k8v4",
    "headkv_usual": "headkv:file=FILE,budget=1024",
    "headkv_25": "headkv:file=FILE,budget=1080+k8v4",
    "simlayerkv_usual": "simlayerkv",
    "simlayerkv_25": "simlayerkv:threshold=0.8,recent=512+k8v4",
    "prefixkv_usual": "prefixkv:budget=1024",
    "prefixkv_25": "prefixkv:budget=1080+k8v4",
    "kvcrush_usual": "kvcrush:budget=1024",
    "kvcrush_25": "kvcrush:budget=1080+k8v4",
    "d2o_usual": "d2o:budget=1024",
    "d2o_25": "d2o:budget=1080+k8v4",
    "cam_usual": "cam:budget=1024",
    "cam_25": "cam:budget=1080+k8v4",
    "kvmerger_usual": "kvmerger:budget=1024",
    "kvmerger_25": "kvmerger:budget=1080+k8v4",
    "snapkv_d2o_25": "snapkv:budget=1080+d2o+k8v4",
    "snapkv_25": "snapkv:budget=1080+k8v4",
    "k4v4": "k4v4",
    "k4v3": "k4v3",
    "k3v3": "k3v3",
    "hadamard_k4v4": "hadamard+k4v4",
    "hadamard_k4v3": "hadamard+k4v3",
    "hadamard_k3v3": "hadamard+k3v3",
    "normal_k4v4": "hadamard+k4v4:levels=normal",
    "normal_k4v3": "hadamard+k4v3:levels=normal",
    "normal_k3v3": "hadamard+k3v3:levels=normal",
    "bfp_k4v4": "k4v4:levels=bfp,group=16",
    "outliers_k4v4": "k4v4:outliers=1",
    "outliers_k3v3": "k3v3:outliers=1",
    "outliers_hadamard_k3v3": "hadamard+k3v3:outliers=1",
    "quest_25": "quest:budget=25%+k8v4",
    "quest_12": "quest:budget=12.5%+k8v4",
    "quest_kv_compress": "kv-compress:budget=2160+k8v4+quest:budget=25%",
}
QUICK: Final = ("kv_compress_25", "razor_25", "headkv_25", "simlayerkv_25", "normal_k3v3")


@dataclass(frozen=True)
class Size:
    """How much is run."""

    names: tuple[str, ...]
    length: int
    samples: int
    batch: int
    continuation: int
    drawn: RandomTokens


def full_size(samples: int) -> Size:
    """What the committed figures come from."""
    return Size(tuple(POLICIES), LENGTH, samples, 8, 64, RandomTokens())


def quick_size() -> Size:
    """A smoke run: the same steps on very little."""
    return Size(QUICK, 300, 1, 1, 8, RandomTokens(period=64, windows=1))


def specs(size: Size, file: Path) -> dict[str, str]:
    """Name the policies as the evaluation does; budgets shrink with the prompt."""
    found = {}
    for name in size.names:
        text = POLICIES[name].replace("FILE", str(file))
        for tokens in (2160, 1080, 1024):
            text = text.replace(f"budget={tokens}", f"budget={tokens * size.length // LENGTH}")
        found[name] = str(parse(text))
    return found


def plans(size: Size, policies: Sequence[str]) -> dict[str, Plan]:
    """The plan of each part."""
    named = (FULL, *policies)
    settings = ("agnostic", "aware")
    needle = Plan(named, ("needle",), settings, size.length, samples=size.samples, seed=4242)
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


def main() -> None:
    """Run both parts and write the result; an interrupted run is resumed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    parser.add_argument("--samples", type=int, default=32, help="prompts of a cell")
    given = parser.parse_args()
    size = quick_size() if given.quick else full_size(given.samples)
    loaded = load_model(progress=CONSOLE.print)
    quick = ".quick" if given.quick else ""
    file = _result.RESULTS / f"methods.heads{quick}.statistics"
    if given.quick or not file.exists():
        head_scores(loaded, file, size.drawn)
    names, rows, journals = specs(size, file), [], []
    for part, plan in plans(size, list(names.values())).items():
        journal = evaluated(loaded, plan, f"methods.{part}{quick}", together=TOGETHER)
        found = cells(loaded, plan, journal, {spec: name for name, spec in names.items()})
        rows += [row | {"policy": str(row["policy"]).replace(str(file), "F")} for row in found]
        journals.append(journal)
    summary = summarize(rows)
    for name, value in summary.items():
        print(f"{name:32} {value:.4f}")
    _result.write("methods", summary, rows, quick=given.quick)
    for journal in journals:
        journal.remove()


if __name__ == "__main__":
    main()
