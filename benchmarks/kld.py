"""How far a dozen policies move the next-token distributions of SmolLM2-135M from the full cache's.

Windows are of Python's help topics. A prompt is read and compressed, and the tokens after it are
forced one at a time; at each, the divergence of Kullback and Leibler from the distribution under
the full cache is computed in float64, beside the nats of the true token. `kl` is the mean over all
tokens, `kl_tail` their 99.9 % quantile, `nats` the nats per token over those of the full cache in
the same windows, and `bytes` the share of the full cache's bytes that is held after the prompt.
Finished samples are in `kld.partial` beside the results; a later run resumes from them.
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Final

import _result
import torch
from _evaluation import CONSOLE, evaluated, finished

from kv_eval.evaluate.divergence import tail
from kv_eval.evaluate.intervals import of_change, of_mean
from kv_eval.evaluate.journal import Journal
from kv_eval.evaluate.plan import Plan
from kv_policy import parse
from kv_transformers.from_text import FULL
from kv_transformers.models import load_model

POLICIES: Final = (
    "k8v8",
    "k8v4",
    "k4v4",
    "k4v4:window=64",
    "k4v4:keys=channel",
    "k4v2:window=64",
    "hadamard+k4v4",
    "hadamard+k4v2",
    "leankv",
    "kv-compress:rate=1.8+k8v4",
    "kv-compress:rate=3.7+k8v4",
    "snapkv:budget=38%+k4v4",
)
TOGETHER: Final = 12  # caches of a prompt that are held at once
PLAN: Final = Plan(
    (FULL, *(str(parse(spec)) for spec in POLICIES)),
    ("nll",),
    ("agnostic",),
    length=2000,
    samples=32,
    batch=8,
    continuation=64,
)
QUICK: Final = replace(
    PLAN, policies=(FULL, "k8v4", "hadamard+k4v2"), length=60, samples=3, batch=2, continuation=4
)

Row = dict[str, object]


def name_of(spec: str) -> str:
    """Name a policy as figures do."""
    return re.sub(r"\W+", "_", spec)


def rows_of(plan: Plan, journal: Journal) -> Iterator[Row]:
    """Yield a row for the full cache and for each policy."""
    full = [entry.score for entry in finished(plan, journal, FULL, "nll", "agnostic")]
    for spec in plan.policies:
        found = finished(plan, journal, spec, "nll", "agnostic")
        nats = [entry.score for entry in found]
        row: Row = {
            "kind": "policy",
            "policy": spec,
            "length": plan.length,
            "continuation": plan.continuation,
            "bytes": fmean(entry.kv_bytes / entry.full_bytes for entry in found),
            "nats": nats,
        }
        if spec == FULL:
            yield row
            continue
        apart = [fmean(entry.divergences) for entry in found]
        yield row | {
            "over_full": fmean(nats) - fmean(full),
            "interval": of_change(nats, full),
            "kl": fmean(apart),
            "kl_interval": of_mean(apart),
            "kl_tail": tail([value for entry in found for value in entry.divergences]),
            "kl_windows": apart,
        }


def summarize(rows: Sequence[Row]) -> dict[str, float]:
    """The figures that a document may quote."""
    figures = {}
    for row in rows:
        name = name_of(str(row["policy"]))
        for figure, key in (("kl", "kl"), ("kl_tail", "kl_tail"), ("nats", "over_full")):
            if key in row:
                figures[f"{figure}_{name}"] = float(str(row[key]))
        if row["policy"] != FULL:
            figures[f"bytes_{name}"] = float(str(row["bytes"]))
    return figures


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    quick = parser.parse_args().quick
    plan = QUICK if quick else PLAN
    loaded = load_model(progress=CONSOLE.print)
    torch.set_num_threads(1)
    journal = evaluated(loaded, plan, "kld" + (".quick" if quick else ""), together=TOGETHER)
    rows = [*rows_of(plan, journal)]
    summary = summarize(rows)
    for name, value in summary.items():
        print(f"{name:40} {value:.5f}")
    _result.write("kld", summary, rows, quick=quick)
    journal.remove()


if __name__ == "__main__":
    main()
