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

`--only PART` measures a part and replaces it in the result, which keeps the other parts.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import _result
import torch
from _evaluation import CONSOLE, cells, evaluated
from _timing import timed

from kv_eval.calibrate.collect import show
from kv_eval.calibrate.passages import Passage, default_passages, read_passage
from kv_eval.calibrate.repeated import Repetitions
from kv_eval.evaluate.decode import read
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
FITTED: Final = 10_800  # tokens of each text that the shipped gate was fitted on, windows of 900
KEPT: Final = (0.5, 0.25, 0.125)
TOGETHER: Final = 32  # caches of a prompt that are held at once: all are small
Row = dict[str, object]

# Tokens per head of 2,000 in k8v4 and in k4v4 with keys per channel that take about this
# percentage of the bytes.
COLUMNS: Final = {25: (1080, 1420), 12: (520, 672), 6: (250, 320), 3: (120, 144)}
CHANNEL: Final = "k4v4:keys=channel"
LONG_TIMES: Final = 2  # of 2,000 tokens, while the gate was fitted on texts of 900
SHARE: Final = 0.3  # of the tokens of other texts that a threshold keeps, beside the newest 64
OTHERS: Final = ("kv-compress", "snapkv", "expected-attention", "kvzip")


def gate(tokens: int, form: str, more: str = "") -> str:
    """Name a gate with a budget."""
    return f"gate:file={GATE},budget={tokens}{more}+{form}"


def policies() -> dict[str, str]:
    """Name all policies by what they are called in the figures, which say the percentage."""
    found = {}
    for percent, (tokens, fewer_bits) in COLUMNS.items():
        found[f"gate_{percent}"] = gate(fewer_bits, CHANNEL)
        found[f"gate_recent_{percent}"] = gate(fewer_bits, CHANNEL, ",recent=64")
        found[f"gate_window_{percent}"] = gate(fewer_bits, CHANNEL, ",recent=64,window=8")
        found[f"gate_k8v4_{percent}"] = gate(tokens, "k8v4")
        for name in OTHERS:
            called = name.replace("-", "_")
            found[f"{called}_{percent}"] = f"{name}:budget={fewer_bits}+{CHANNEL}"
            found[f"{called}_k8v4_{percent}"] = f"{name}:budget={tokens}+k8v4"
    most = LONG_TIMES * COLUMNS[12][1]  # of prompts that are so many times as long
    found["gate_long_12"] = gate(most, CHANNEL, ",recent=64")
    found["kv_compress_long_12"] = f"kv-compress:budget={most}+{CHANNEL}"
    found["gate_share_12"] = f"gate:file={GATE},share={SHARE},recent=64+{CHANNEL}"
    return {name: str(parse(spec)) for name, spec in found.items()}


def chosen(*names: str) -> tuple[str, ...]:
    """Return the full cache and the policies that are called so."""
    every = policies()
    return (FULL, *(every[name] for name in names))


@dataclass(frozen=True)
class Size:
    """How much is run."""

    plans: dict[str, Plan]
    length: int
    rounds: int
    texts: int = 4  # default texts whose overlap is measured


# Measured with the question inside the prompt, too.
AWARE: Final = ("gate_recent_12", "gate_window_12", "kv_compress_12")
MORE: Final = ("gate_window_12", "gate_window_6", "gate_share_12", "snapkv_12")
AFTER: Final = (
    "gate_25",
    "gate_12",
    "gate_6",
    "gate_recent_12",
    "gate_k8v4_12",
    "kv_compress_12",
    "kvzip_12",
)
SMALL: Final = ("gate_3", "gate_recent_3", "gate_k8v4_3", "expected_attention_12")
LONG: Final = ("gate_long_12", "kv_compress_long_12")
NATS: Final = (
    "gate_12",
    "gate_recent_12",
    "gate_share_12",
    "kv_compress_12",
    "kv_compress_k8v4_12",
)


def full_size(samples: int) -> Size:
    """What the committed figures come from."""
    plan = Plan(chosen(*AFTER), ("needle",), ("agnostic",), length=2000, samples=samples, seed=4242)
    aware = replace(plan, policies=chosen(*AWARE), settings=("aware",))
    more = replace(plan, policies=chosen(*MORE))
    small = replace(more, policies=chosen(*SMALL))
    few = chosen("gate_12", "gate_k8v4_12", "kv_compress_12", "kvzip_12")
    return Size(
        {
            "needle": plan,
            "multikey": replace(plan, tasks=("multikey",)),
            "needle-aware": aware,
            "multikey-aware": replace(aware, tasks=("multikey",)),
            "needle-more": more,
            "multikey-more": replace(more, tasks=("multikey",)),
            "needle-small": small,
            "multikey-small": replace(small, tasks=("multikey",)),
            "needle-long": replace(more, policies=chosen(*LONG), length=2000 * LONG_TIMES),
            "nll": replace(
                plan, tasks=("nll",), policies=chosen(*NATS), samples=32, continuation=64, batch=8
            ),
            "tracking": replace(plan, tasks=("variable-tracking",), policies=few),
            "agreement": replace(plan, tasks=("agreement",), policies=few, samples=32),
        },
        length=2000,
        rounds=7,
    )


def quick_size() -> Size:
    """A smoke run: the same steps on very little."""
    few = chosen("gate_3", "gate_k8v4_3", "kvzip_3")
    plan = Plan(few, ("needle",), ("agnostic",), length=300, samples=1, continuation=8)
    plans = {"needle": plan, "nll": replace(plan, tasks=("nll",))}
    return Size(plans, 300, rounds=1, texts=1)


def overlaps(loaded: LoadedModel, size: Size, given: Sequence[Passage]) -> Iterator[Row]:
    """Yield how many of KVzip's tokens the shipped gate keeps, text by text."""
    shape = cache_shape(loaded.model)
    ropes = find_ropes(loaded.model, shape, "gate")
    network = load(GATE).network
    fitted = default_passages()[: size.texts]
    for passage in (*fitted, *given):
        repetitions = Repetitions(FITTED)
        windows, last = repetitions.windows(loaded, [passage])
        others = [*windows, *last.values()] if passage in given else list(last.values())
        instruction = len(repetitions.instruction(loaded))
        calibration = GateCalibration(replace(shape, rope=ropes), instruction)
        evaluation = calibration.evaluation(network)
        for window in others:
            show(loaded, evaluation, window)
        each = {f"overlap_{share:g}": evaluation.overlap(share) for share in KEPT}
        CONSOLE.print(f"{passage.name}: {each}")
        yield {"kind": "overlap", "text": passage.name, "windows": len(others)} | each


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


# Policies whose means are figures, with what follows the task in their names. At an eighth of the
# bytes it is the better of the newest 64 and the newest 8 tokens, both measured. A cell that two
# parts have is that of the first.
NAMED: Final = {
    FULL: "full",
    "gate_25": "25",
    "gate_recent_12": "12",
    "gate_6": "6",
    "gate_window_12": "12_window",
    "gate_window_6": "6_window",
    "gate_share_12": "12_share",
    "gate_12": "12_recent_8",
    "gate_k8v4_12": "12_k8v4",
    "kv_compress_12": "12_kv_compress",
    "kv_compress_k8v4_12": "12_kv_compress_k8v4",
    "snapkv_12": "12_snapkv",
    "gate_3": "3",
    "gate_recent_3": "3_recent_64",
    "gate_k8v4_3": "3_k8v4",
    "expected_attention_12": "12_expected_attention",
    "gate_long_12": "12",
    "kv_compress_long_12": "12_kv_compress",
    "kvzip_12": "12_kvzip",
}


def summarize(rows: Sequence[Row]) -> dict[str, float]:
    """The figures that a document may quote."""
    figures: dict[str, float] = {}
    for row in (row for row in rows if row["kind"] == "cell" and row["name"] in NAMED):
        setting = "" if row["setting"] == "agnostic" else f"{row['setting']}_"
        task = "nats" if row["task"] == "nll" else str(row["task"]).replace("-", "_")
        name = f"{setting}{task}_{NAMED[str(row['name'])]}"
        figures.setdefault(name, float(str(row["mean"])))
    for row in (row for row in rows if row["kind"] == "cell" and row["name"] in NAMED):
        if row["name"] != FULL:
            figures.setdefault(f"bytes_{NAMED[str(row['name'])]}", float(str(row["bytes"])))
    texts = [row for row in rows if row["kind"] == "overlap"]
    for share in KEPT if texts else ():
        least = min(float(str(row[f"overlap_{share:g}"])) for row in texts)
        figures[f"overlap_{int(share * 100)}"] = least
    ways = {"gate": "prefill_ratio", "kvzip": "kvzip_prefill_ratio"}
    for row in rows:
        if row["kind"] == "prefill" and row["way"] in ways and isinstance(row["ratio"], list):
            figures[ways[str(row["way"])]] = row["ratio"][1]
    return figures


def measured(
    loaded: LoadedModel, size: Size, part: str, given: Sequence[Passage], quick: bool
) -> list[Row]:
    """Measure one part."""
    if part == "overlap":
        return [*overlaps(loaded, size, given)]
    if part == "prefill":
        return [*seconds(loaded, size)]
    name = f"gate.{part}" + (".quick" if quick else "")
    plan = size.plans[part]
    journal = evaluated(loaded, plan, name, together=TOGETHER)
    called = {spec: name for name, spec in policies().items()}
    longer = "-long" if plan.length == 2000 * LONG_TIMES else ""
    found = cells(loaded, plan, journal, called)
    return [row | {"task": f"{row['task']}{longer}"} for row in found]


def earlier() -> list[Row]:
    """Read the rows of the parts that the result has."""
    there = (_result.RESULTS / "gate.json").exists()
    return [*_result.rows_of("gate")] if there else []


def main() -> None:
    """Run the parts and write the result after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    parser.add_argument("--samples", type=int, default=64, help="prompts of a cell")
    parser.add_argument("--dtype", default="auto", help="of the model, such as float32")
    parser.add_argument("--text", type=Path, action="append", default=[], help="more for overlaps")
    names = (*full_size(1).plans, "overlap", "prefill")
    parser.add_argument("--only", choices=names, action="append", help="the parts to measure")
    given = parser.parse_args()
    size = quick_size() if given.quick else full_size(given.samples)
    loaded = load_model(dtype=given.dtype, progress=CONSOLE.print)
    texts = [read_passage(path) for path in given.text]
    rows: list[Row] = []
    for part in names:
        if part not in (given.only or (*size.plans, "overlap", "prefill")):
            continue
        found = measured(loaded, size, part, texts, given.quick)
        stamp = {"part": part, "commit": _result.commit(replaced="gate")}
        if not given.quick:  # another process may have measured another part meanwhile
            rows = earlier()
        rows = [row for row in rows if row["part"] != part] + [stamp | row for row in found]
        rows.sort(key=lambda row: names.index(str(row["part"])))
        _result.write("gate", summarize(rows), rows, quick=given.quick)
    for name, value in summarize(rows).items():
        print(f"{name:40} {value:.4f}")


if __name__ == "__main__":
    main()
