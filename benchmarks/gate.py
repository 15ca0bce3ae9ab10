"""The gate beside KVzip, which it predicts, and beside methods that read queries, at equal bytes.

Cells are needle, multikey and variable tracking, with the question after the compressed prompt
(`agnostic`) and inside it (`aware`), nats per token of the text that follows a compressed prompt,
and agreement with the full cache. Tokens per head and format are chosen so that the bytes of a
column are alike; they are those that a cache holds after the prompt, by its own accounting, over
those of an uncompressed cache of two bytes per number. Prompts are of the default text, which the
shipped gate was not fitted on.

`overlap` is the share of KVzip's tokens that the gate keeps, of windows that it was not fitted on:
the last window of each default text, and all windows of the texts given with `--text`.
`prefill_ratio_gate` and those of others are seconds to read a prompt with the same format,
over those without a selector, in turn.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Final

import _result
import torch
from _evaluation import CONSOLE, evaluated
from _timing import timed

from kv_eval.calibrate.collect import show
from kv_eval.calibrate.passages import Passage, default_passages, read_passage
from kv_eval.calibrate.repeated import Repetitions
from kv_eval.evaluate.decode import read
from kv_eval.evaluate.intervals import of_change, of_mean
from kv_eval.evaluate.journal import Finished, Journal
from kv_eval.evaluate.plan import Plan
from kv_eval.tasks import default_text, nll
from kv_evict.gate_calibration import GateCalibration
from kv_evict.gate_file import load
from kv_policy import parse
from kv_transformers import CompressedCache, cache_shape
from kv_transformers.from_text import FULL
from kv_transformers.models import LoadedModel, load_model
from kv_transformers.rotary import find_ropes

GATE: Final = "smollm2-135m"
FITTED: Final = 4500  # tokens of each text that the shipped gate was fitted on, in windows of 900
KEPT: Final = (0.5, 0.25, 0.125)
TOGETHER: Final = 32  # caches of a prompt that are held at once: all are small
Row = dict[str, object]

# Tokens per head of 2,000 in k8v4 and in k4v4 that take about this percentage of the bytes.
COLUMNS: Final = {25: (1080, 1512), 12: (520, 728), 6: (250, 350), 3: (120, 168)}
HALF: Final = 1900  # tokens in k8v4 that take about 45 %
OTHERS: Final = ("kv-compress", "snapkv", "expected-attention", "kvzip")


def gate(tokens: int, form: str, more: str = "") -> str:
    """Name a gate with a budget."""
    return str(parse(f"gate:file={GATE},budget={tokens}{more}+{form}"))


def column(percent: int, tokens: int, fewer_bits: int) -> dict[str, str]:
    """Name the policies of a column."""
    return {
        f"gate_{percent}": gate(tokens, "k8v4"),
        f"gate_k4v4_{percent}": gate(fewer_bits, "k4v4"),
        f"gate_recent_{percent}": gate(tokens, "k8v4", ",recent=64"),
        **{
            f"{name.replace('-', '_')}_{percent}": str(parse(f"{name}:budget={tokens}+k8v4"))
            for name in OTHERS
        },
    }


@dataclass(frozen=True)
class Size:
    """How much is run."""

    policies: dict[str, str]  # by the name in the figures
    plans: dict[str, Plan]
    length: int
    rounds: int
    texts: int = 4  # default texts whose overlap is measured


def full_size(samples: int) -> Size:
    """What the committed figures come from."""
    both = ("aware", "agnostic")
    plan = Plan((FULL,), ("needle",), both, length=2000, samples=samples, seed=4242)
    named = {"gate_50": gate(HALF, "k8v4"), "kv_compress_50": f"kv-compress:budget={HALF}+k8v4"}
    for percent, tokens in COLUMNS.items():
        named |= column(percent, *tokens)
    named["gate_share_12"] = str(parse(f"gate:file={GATE},share=0.26+k8v4"))
    return Size(
        {name: str(parse(spec)) for name, spec in named.items()},
        {
            "needle": plan,
            "multikey": replace(plan, tasks=("multikey",)),
            "tracking": replace(plan, tasks=("variable-tracking",)),
            "nll": replace(plan, tasks=("nll",), settings=("agnostic",), samples=32),
            "agreement": replace(plan, tasks=("agreement",), settings=("agnostic",), samples=32),
        },
        length=2000,
        rounds=7,
    )


def quick_size() -> Size:
    """A smoke run: the same steps on very little."""
    plan = Plan((FULL,), ("needle",), ("agnostic",), length=300, samples=1, continuation=8)
    named = column(12, 64, 80) | {"gate_share_12": f"gate:file={GATE},share=0.26+k8v4"}
    plans = {"needle": plan, "nll": replace(plan, tasks=("nll",))}
    return Size({n: str(parse(s)) for n, s in named.items()}, plans, 300, rounds=1, texts=1)


def cells(
    loaded: LoadedModel, size: Size, plan: Plan, journal: Journal
) -> Iterator[tuple[str, Row]]:
    """Yield the mean of each policy in each cell, with its interval and that of the change."""
    element = torch.empty(0, dtype=loaded.model.dtype).element_size()
    for task, setting in plan.pairs:
        full = _scores(_samples(plan, journal, FULL, task, setting))
        for name, spec in {FULL: FULL, **size.policies}.items():
            found = _samples(plan, journal, spec, task, setting)
            scores = _scores(found)
            held = fmean(each.kv_bytes / each.full_bytes for each in found) * element / 2
            yield (
                name,
                {
                    "kind": "cell",
                    "task": task,
                    "setting": setting,
                    "policy": spec,
                    "samples": len(scores),
                    "mean": fmean(scores),
                    "interval": of_mean(scores),
                    "change": of_change(scores, full) if name != FULL else None,
                    "bytes": 1.0 if name == FULL else held,
                },
            )


def _samples(plan: Plan, journal: Journal, spec: str, task: str, setting: str) -> list[Finished]:
    found = [journal.get(spec, task, setting, i) for i in range(plan.each)]
    return [entry for entry in found if entry is not None]


def _scores(found: Sequence[Finished]) -> list[float]:
    return [entry.score for entry in found]


def overlaps(loaded: LoadedModel, size: Size, given: Sequence[Passage]) -> Iterator[Row]:
    """Yield how many of KVzip's tokens the shipped gate keeps, text by text."""
    shape = cache_shape(loaded.model)
    ropes = find_ropes(loaded.model, shape, "gate")
    weight = load(GATE).weight
    fitted = default_passages()[: size.texts]
    for passage in (*fitted, *given):
        repetitions = Repetitions(max(FITTED, 4096))
        windows, last = repetitions.windows(loaded, [passage])
        chosen = [*windows, *last.values()] if passage in given else list(last.values())
        instruction = len(repetitions.instruction(loaded))
        calibration = GateCalibration(replace(shape, rope=ropes), instruction)
        evaluation = calibration.evaluation(weight)
        for window in chosen:
            show(loaded, evaluation, window)
        each = {f"overlap_{share:g}": evaluation.overlap(share) for share in KEPT}
        CONSOLE.print(f"{passage.name}: {each}")
        yield {"kind": "overlap", "text": passage.name, "windows": len(chosen)} | each


def seconds(loaded: LoadedModel, size: Size) -> Iterator[Row]:
    """Yield the seconds of reading a prompt, in turn with one that keeps every token."""
    (sample,) = nll(loaded.tokenizer, default_text(), length=size.length, samples=1, seed=0)
    prompt = torch.tensor([sample.prompt_ids])
    tokens = COLUMNS[12][0]
    specs = {
        "k8v4": "k8v4",
        "gate": gate(tokens, "k8v4"),
        "kv-compress": f"kv-compress:budget={tokens}+k8v4",
        "kvzip": f"kvzip:budget={tokens}+k8v4",
    }

    def prefill(spec: str) -> None:
        cache = CompressedCache(loaded.model, spec, tokenizer=loaded.tokenizer)
        read(loaded.model, cache, prompt)

    work = {name: lambda spec=spec: prefill(spec) for name, spec in specs.items()}
    turns = timed(work, size.rounds, clock=time.perf_counter)
    for name, spec in specs.items():
        yield {
            "kind": "prefill",
            "way": name,
            "policy": spec,
            "seconds": turns.median(name),
            "ratio": turns.quartiles((name,), ("k8v4",)) if size.rounds > 1 else None,
        }


def summarize(named: Sequence[tuple[str, Row]], others: Sequence[Row]) -> dict[str, float]:
    """The figures that a document may quote."""
    figures: dict[str, float] = {}
    for name, row in named:
        setting = "" if row["setting"] == "agnostic" else f"_{row['setting']}"
        figures[f"{row['task']}{setting}_{name}".replace("-", "_")] = float(str(row["mean"]))
        figures.setdefault(f"bytes_{name}", float(str(row["bytes"])))
    texts = [row for row in others if row["kind"] == "overlap"]
    for share in KEPT if texts else ():
        least = min(float(str(row[f"overlap_{share:g}"])) for row in texts)
        figures[f"overlap_{int(share * 100)}"] = least
    for row in others:
        if row["kind"] == "prefill" and isinstance(row["ratio"], list):
            figures[f"prefill_ratio_{row['way']}".replace("-", "_")] = row["ratio"][1]
    return figures


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    parser.add_argument("--samples", type=int, default=64, help="prompts of a cell")
    parser.add_argument("--dtype", default="auto", help="of the model, such as float32")
    parser.add_argument("--text", type=Path, action="append", default=[], help="more for overlaps")
    names = tuple(full_size(1).plans)
    parser.add_argument("--only", choices=names, help="run a part, which a later run goes on from")
    given = parser.parse_args()
    size = quick_size() if given.quick else full_size(given.samples)
    loaded = load_model(dtype=given.dtype, progress=CONSOLE.print)
    named: list[tuple[str, Row]] = []
    journals = []
    for name, plan in size.plans.items():
        if given.only in (None, name):
            plan = replace(plan, policies=(FULL, *size.policies.values()))
            part = f"gate.{name}" + (".quick" if given.quick else "")
            journals.append(evaluated(loaded, plan, part, together=TOGETHER))
            named += cells(loaded, size, plan, journals[-1])
    if given.only:
        return
    others = [*overlaps(loaded, size, [read_passage(path) for path in given.text])]
    others += seconds(loaded, size)
    summary = summarize(named, others)
    for name, value in summary.items():
        print(f"{name:40} {value:.4f}")
    _result.write("gate", summary, [*(row for _, row in named), *others], quick=given.quick)
    for journal in journals:
        journal.remove()


if __name__ == "__main__":
    main()
