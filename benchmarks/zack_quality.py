"""ZACK on SmolLM2: spectra, how stable bases are, and quality against what is removed.

Bases come from docstrings of Python's standard library; prompts are cut from Python's help topics,
so no prompt was read in calibration. Further texts are compared with --text.

* `spectrum`: mean singular values of a layer's heads, each head's over its greatest; of queries and
  keys stacked, of values and the output projection, and of keys and values alone.
* `drift`: how much worse bases of one text serve another, at the ranks of a rate of 0.25; `mixed`
  the same for a basis of all texts but the one; `tokens` for one of fewer tokens of the same text.
* `rate`: nats per token of held-out windows read in one pass over the cache of a policy. Attention
  of the pass runs in the reduced space, so it loses what it would lose token by token.
  `rate_at_99` is the greatest rate found by halving that keeps the nats within 1 % of the full
  cache's.
* `policy`: tasks, as `kv-serve eval` gives them, with the bytes held after the prompt.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import _result
import _zack
import msgspec
from _evaluation import CONSOLE, evaluated, samples_of
from _zack_bases import calibration, draw, spectra, stability
from _zack_rates import greatest, placed, rates
from _zack_size import full_size, quick_size

from kv_eval.calibrate.loss import loss
from kv_eval.evaluate.journal import Journal
from kv_eval.evaluate.plan import Plan
from kv_eval.evaluate.report import rows as report_rows
from kv_eval.tasks import read_text
from kv_policy.files import write_whole
from kv_transformers.from_text import FULL, make_cache
from kv_transformers.models import load_model

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel


def judged(spec: str, parts: Sequence[tuple[Plan, Journal]]) -> dict[str, object]:
    """Sum a policy up over the tasks."""
    row: dict[str, object] = {"kind": "policy", "policy": spec}
    asked = []
    for plan, journal in parts:
        mine, full = zip(*samples_of(plan, journal, spec), strict=True)
        (task,) = plan.tasks
        held = fmean(entry.kv_bytes / entry.full_bytes for entry in mine)
        found = loss([a.score for a in mine], [b.score for b in full], task)
        row |= {task: fmean(a.score for a in mine), f"{task}_bytes": held}
        row |= {f"{task}_lost": found.mean, f"{task}_noise": found.noise}
        if task != "nll":
            asked.append(held)
    return row | {"bytes": fmean(asked)}


def answers_kept(rows: Sequence[dict[str, object]], ranks: str) -> float:
    """The greatest rate at which needle and multikey keep 99 % of the full cache's score."""
    table = {str(row["policy"]): row for row in rows if row["kind"] == "policy"}
    full, best = table[FULL], 0.0
    for spec, row in table.items():
        if (
            spec.startswith("zack")
            and "+" not in spec
            and ("uniform" in spec) == (ranks == "uniform")
        ):
            rate = float(spec.partition("rate=")[2].partition(",")[0])
            share = (float(str(row[t])) / float(str(full[t])) for t in ("needle", "multikey"))
            best = max(best, rate) if min(share) >= 0.99 else best
    return best


def summarize(rows: Sequence[dict[str, object]]) -> dict[str, float]:
    """The figures that a document may quote."""
    found = {
        "rate_at_99": greatest(rows, "zack"),
        "rate_at_99_uniform": greatest(rows, "zack:multiple=1,ranks=uniform"),
        "rate_at_99_multiple_1": greatest(rows, "zack:multiple=1"),
        "rate_at_99_multiple_8": greatest(rows, "zack:multiple=8"),
        "rate_at_99_kq_svd": greatest(rows, "kq-svd:multiple=1"),
        "answers_rate_at_99": answers_kept(rows, "adaptive"),
        "answers_rate_at_99_uniform": answers_kept(rows, "uniform"),
    }
    at = [row for row in rows if row.get("rate") == 0.25]
    for kind, name in (("drift", "subspace_drift"), ("mixed", "subspace_drift_mixed")):
        mine = [row for row in at if row["kind"] == kind]
        for pair, short in (("Q-K", "qk"), ("V-O", "vo")):
            found[f"{name}_{short}"] = max(float(str(row[f"{pair} excess"])) for row in mine)
    found["subspace_drift"] = max(found["subspace_drift_qk"], found["subspace_drift_vo"])
    fewer = [row for row in at if row["kind"] == "tokens"]
    near = next((row for row in fewer if row["tokens"] == 16384), fewer[-1])
    found["subspace_drift_same_text"] = max(
        float(str(near[f"{pair} excess"])) for pair in ("Q-K", "V-O")
    )
    return found


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="texts to compare with")
    parser.add_argument("--plot", type=Path, help="draw the spectra into an SVG file")
    parser.add_argument(
        "--only",
        choices=("bases", "rates", "needle", "multikey", "nll"),
        help="run a part, which a later run goes on from",
    )
    arguments = parser.parse_args()
    quick, only = arguments.quick, arguments.only
    if arguments.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    size = quick_size() if quick else full_size()
    loaded, folder = load_model(progress=CONSOLE.print), _result.RESULTS
    others = [read_text(path) for path in arguments.text]
    path, found = calibration(loaded, _zack.docstrings(), size.tokens, folder, quick)

    rows: list[dict[str, object]] = []
    for name in ("bases", "rates"):
        if only not in (None, name):
            continue
        store = folder / f"zack_quality.{name}{'.quick' if quick else ''}.rows.partial"
        if store.exists():
            rows += msgspec.json.decode(store.read_bytes())
            continue
        if name == "bases":
            mine = spectra(found) + stability(loaded, size, others, folder, quick)
        else:
            mine = rates(loaded, size, path)
        write_whole(store, msgspec.json.encode(mine))
        rows += mine

    def make(model: "PreTrainedModel", spec: str) -> "Cache":
        return make_cache(model, spec if spec == FULL else placed(spec, path))

    parts = []
    for name, plan in size.plans.items():
        if only in (None, name):
            asked = replace(plan, policies=size.policies)
            label = f"zack_quality.{name}" + (".quick" if quick else "")
            # Caches of equal basis share a prompt's pass, so all are asked at once.
            count = len(size.policies)
            parts.append((asked, evaluated(loaded, asked, label, make, count)))
    if only:
        return
    rows += [judged(spec, parts) for spec in size.policies]
    for plan, journal in parts:
        rows += [{"kind": r.task, **msgspec.to_builtins(r)} for r in report_rows(plan, journal)]
    summary = summarize(rows)
    for name, value in summary.items():
        print(f"{name:28} {value:.4f}")
    _result.write("zack_quality", summary, rows, quick=quick)
    if arguments.plot:
        draw(rows, arguments.plot)
    for _, journal in parts:
        journal.remove()
    mark = ".quick" if quick else ""
    for kind in ("partial", "statistics"):
        for left in folder.glob(f"zack_quality.*{mark}*.{kind}"):
            left.unlink()


if __name__ == "__main__":
    main()
