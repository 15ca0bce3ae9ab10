"""The thirteen tasks of RULER under the full cache and under policies, with the question after it.

Prompts have exactly `--length` tokens, are compressed, and the question follows, as in kvpress;
scores are RULER's string match. Cells are the mean of a policy on a task, `mean` is over all tasks,
`bytes` the share of a full 16-bit cache's bytes that is held after the prompt, `tokens` the share
of its tokens that is kept per KV head. The tasks are generated here, and `qa_1` and `qa_2` are
questions about generated facts: figures are to be compared with each other, not with RULER's.

By default it is of SmolLM2-135M on two cores, for which two things are cut: prompts have 1,000
tokens (`--length`), in which the full cache of so small a model still finds what is hidden, and
answers end after 64 tokens (`--answer`), into which four numbers or ten words fit, instead of the
128 and 120 of RULER. A larger model is measured by the same script on a GPU, with `--model NAME
--length 4096 --answer 128 --results FOLDER`, and with `--gate FILE` for a gate fitted to it.

Finished samples are in `ruler.partial` beside the results; a later run resumes from them.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import _result
import torch
from _arguments import count
from _evaluation import CONSOLE, cell, cells, evaluated

from kv_eval.evaluate.journal import Journal
from kv_eval.evaluate.plan import Plan
from kv_eval.evaluate.report import over_tasks
from kv_eval.tasks import RULER
from kv_policy import parse
from kv_transformers.from_text import FULL
from kv_transformers.models import LoadedModel, load_model

GATE: Final = "smollm2-135m"  # the shipped gate of the default model
GROUP: Final = "ruler"
SETTING: Final = "agnostic"
TOGETHER: Final = 8  # caches of a batch of prompts that are held at once
POLICIES: Final[Mapping[str, str]] = {
    "k8v4": "k8v4",
    "leankv": "leankv",
    "kv_compress_2": "kv-compress:rate=2+k8v4",
    "kv_compress_4": "kv-compress:rate=4+k8v4",
    "snapkv_4": "snapkv:keep=25%+k8v4",
    "streaming_4": "streaming:keep=25%+k8v4",
}
GATED: Final = "gate:file={},keep=25%,recent=64+k8v4"
QUICK: Final = ("k8v4", "kv_compress_4")

Row = dict[str, object]


def policies(gate: str | None, *, quick: bool) -> dict[str, str]:
    """Return the policies by what they are called in figures."""
    found = {name: POLICIES[name] for name in QUICK} if quick else dict(POLICIES)
    if gate is not None and not quick:
        found["gate_4"] = GATED.format(gate)
    return {name: str(parse(spec)) for name, spec in found.items()}


def means(
    loaded: LoadedModel, plan: Plan, journal: Journal, names: Mapping[str, str]
) -> Iterator[Row]:
    """Yield the mean over all tasks of each policy, with its interval and that of the change."""
    element = torch.empty(0, dtype=loaded.model.dtype).element_size()
    full = over_tasks(FULL, plan, journal, GROUP, plan.tasks, SETTING)
    for spec in plan.policies:
        found = over_tasks(spec, plan, journal, GROUP, plan.tasks, SETTING)
        name = FULL if spec == FULL else names[spec]
        yield cell(found, full, name, element) | {"kind": "mean"}


def summarize(rows: Sequence[Row]) -> dict[str, float]:
    """The figures that a document may quote."""
    figures: dict[str, float] = {}
    over_all = [row for row in rows if row["kind"] == "mean"]
    for row in over_all:
        figures[f"mean_{row['name']}"] = float(str(row["mean"]))
    for what in ("bytes", "tokens"):
        for row in over_all:
            if row["name"] != FULL:
                figures[f"{what}_{row['name']}"] = float(str(row[what]))
    return figures


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    parser.add_argument("--model", help="another model than SmolLM2-135M; needs --results")
    parser.add_argument("--device", help="by default a GPU, if there is one")
    parser.add_argument("--gate", help="a gate that was fitted to the model")
    parser.add_argument("--length", type=count, default=1000, help="tokens of a prompt")
    parser.add_argument("--answer", type=count, default=64, help="maximum tokens of an answer")
    parser.add_argument("--samples", type=count, default=32, help="prompts of a task")
    parser.add_argument("--batch", type=count, default=16, help="prompts that run together")
    parser.add_argument("--results", type=Path, help="folder of the result and of its journal")
    given = parser.parse_args()
    if given.model is not None and given.results is None:
        parser.error(
            "--model is measured into a folder of its own, as the results here are of "
            "SmolLM2-135M; add --results FOLDER"
        )
    if given.model is None and given.gate is None:
        given.gate = GATE
    return given


def main() -> None:
    """Run everything and write the result."""
    given = arguments()
    names = policies(given.gate, quick=given.quick)
    plan = Plan(
        (FULL, *names.values()),
        RULER,
        (SETTING,),
        given.length,
        given.samples,
        batch=given.batch,
        answer=given.answer,
    )
    if given.quick:
        plan = replace(plan, length=700, samples=2, answer=4)
    folder = given.results or _result.RESULTS
    loaded = load_model(given.model, device=given.device, progress=CONSOLE.print)
    quick = ".quick" if given.quick else ""
    journal = evaluated(loaded, plan, f"ruler{quick}", together=TOGETHER, folder=folder)
    called = {spec: name for name, spec in names.items()}
    about: Row = {
        "kind": "about",
        "model": loaded.name,
        "fingerprint": loaded.fingerprint,
        "length": plan.length,
        "samples": plan.samples,
        "answer": plan.answer,
        "setting": SETTING,
    }
    rows = [
        about,
        *cells(loaded, plan, journal, called),
        *means(loaded, plan, journal, called),
    ]
    summary = summarize(rows)
    for name, value in summary.items():
        print(f"{name:28} {value:.4f}")
    _result.write("ruler", summary, rows, quick=given.quick, folder=folder)
    journal.remove()


if __name__ == "__main__":
    main()
