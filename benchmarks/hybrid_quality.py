# environment: vllm
"""A hybrid model, in both hosts: SmolLM2-135M with a window of 1,024 tokens in every second layer.

The model was not trained so; the full cache says what the windows cost. Cells are needle and
multikey, prompts of 2,000 tokens, the question inside the prompt. A policy compresses the layers of
full attention. `shallow` has the windows in layers 0, 2, 4, ...,
`deep` in layers 1, 3, 5, ...; `plain` has none. Bytes are what a cache holds after the prompt over
what the same model's full cache holds, windows included; those of transformers.
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Final, cast

from _evaluation import evaluated
from _vllm_engine import Room
from _vllm_load import raw_token_bytes
from _vllm_process import Row, Rows, apart
from _vllm_quality import scores
from _vllm_ways import BF16, figure
from _windowed import windowed

from kv_eval.evaluate.intervals import of_mean
from kv_eval.evaluate.plan import Plan
from kv_eval.tasks import default_text
from kv_policy import parse
from kv_transformers.from_text import FULL
from kv_transformers.models import load_model

POLICIES: Final = ("k8v4", "kv-compress:rate=4", "kv-compress:rate=4+k8v4")
SERVED: Final = (BF16, *POLICIES)
TASKS: Final = ("needle", "multikey")
# The first layer with a window; None: no windows.
MODELS: Final[Mapping[str, int | None]] = {"plain": None, "shallow": 0, "deep": 1}
LENGTH: Final = 2000


def plan_of(task: str, samples: int, *, quick: bool) -> Plan:
    """The samples and policies of a task."""
    specs = (FULL, *(str(parse(spec)) for spec in POLICIES))
    length = 300 if quick else LENGTH
    return Plan(specs, (task,), ("aware",), length=length, samples=samples, seed=2900)


def in_transformers(rows: Rows, model: str, task: str, samples: int) -> None:
    """Measure a task under every policy in transformers."""
    first, plan = MODELS[model], plan_of(task, samples, quick=rows.quick)
    key: Row = {"kind": "transformers", "model": model, "task": task}

    def measure() -> Row:
        folder = None if first is None else str(windowed("transformers", first))
        name = f"{rows.name}.{model}.{task}{'.quick' if rows.quick else ''}"
        journal = evaluated(load_model(folder), plan, name)
        found: Row = {}
        for spec in plan.policies:
            each = [journal.get(spec, task, "aware", i) for i in range(samples)]
            entries = [entry for entry in each if entry is not None]
            found[figure(spec)] = {
                "scores": [entry.score for entry in entries],
                "bytes": fmean(entry.kv_bytes / entry.full_bytes for entry in entries),
            }
        journal.remove()
        return found

    rows.measured(key, measure)


def in_vllm(rows: Rows, model: str, way: str, samples: int) -> None:
    """Measure all tasks under one policy in vLLM."""
    first = MODELS[model]
    if first is None:
        return
    loaded = load_model()
    plans = [plan_of(task, samples, quick=rows.quick) for task in TASKS]
    tasks = {p.tasks[0]: p.samples_of(loaded, default_text(), *p.pairs[0]) for p in plans}
    longest = max(s.length + s.new_tokens for each in tasks.values() for s in each)
    held = 4 * longest + 1024
    room = Room(held * raw_token_bytes(), longest, chunk=plans[0].length, together=1)
    room = replace(room, model=str(windowed("vllm", first)))
    key: Row = {"kind": "vllm", "model": model, "way": figure(way)}
    rows.measured(key, lambda: cast(Row, dict(apart(scores, way, room, tasks))))


def cells(rows: Rows) -> list[Row]:
    """Return each cell with its mean and interval."""
    found: list[Row] = []
    for row in rows.rows:
        host, model = str(row["kind"]), str(row["model"])
        if host == "transformers":
            parts = {k: v for k, v in row.items() if isinstance(v, dict)}
            for way, each in parts.items():
                more = {"task": row["task"], "way": way, "bytes": each["bytes"]}
                found.append(_cell(host, model, more, each["scores"]))
        elif host == "vllm":
            way = FULL if row["way"] == BF16 else row["way"]
            for task in TASKS:
                more = {"task": task, "way": way}
                found.append(_cell(host, model, more, cast("list[float]", row[task])))
    return found


def _cell(host: str, model: str, more: Row, each: list[float]) -> Row:
    interval = {"samples": len(each), "mean": fmean(each), "interval": of_mean(each)}
    return {"kind": "cell", "host": host, "model": model, **more, **interval}


def figures(found: list[Row]) -> dict[str, float]:
    """Return the means, and the bytes under transformers."""
    made: dict[str, float] = {}
    for row in found:
        name = f"{row['model']}_{row['way']}"
        made[f"{row['host']}_{row['task']}_{name}"] = float(str(row["mean"]))
        if "bytes" in row and row["way"] != FULL:
            made[f"bytes_{name}"] = float(str(row["bytes"]))
    return made


def main() -> None:
    """Measure everything; a later run resumes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    parser.add_argument("--minutes", type=float, help="begin no row after so long")
    parser.add_argument("--samples", type=int, default=32, help="prompts of a cell")
    given = parser.parse_args()
    samples = 1 if given.quick else given.samples
    asked = {"policies": POLICIES, "samples": samples}
    rows = Rows("hybrid_quality", asked, quick=given.quick, minutes=given.minutes)
    for model in MODELS:
        for task in TASKS:
            in_transformers(rows, model, task, samples)
        for way in SERVED:
            in_vllm(rows, model, way, samples)
    found = cells(rows)
    rows.rows += found
    rows.finish(figures(found))


if __name__ == "__main__":
    main()
