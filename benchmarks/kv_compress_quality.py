"""KV-Compress beside the methods it is measured against, at equal tokens per head.

Every method keeps C tokens per KV head on average, of prompts of 4,000 tokens: C = 128 to 1,024.
Cells are needle and multikey, each with the question inside the compressed prompt (`aware`) and
after it (`agnostic`), and nats per token of the text that follows a compressed prompt.

The average of a row is over the five cells. Nats go into it as the share of the likelihood per
token that is left, e^(full - row), so that each cell is at most about 1.

Bytes are what a cache holds after the prompt, by its own accounting, pages and tables included.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import _result
import torch
from _evaluation import CONSOLE, evaluated

from kv_eval.evaluate.decode import read
from kv_eval.evaluate.journal import Finished, Journal
from kv_eval.evaluate.plan import Plan
from kv_eval.tasks import default_text, nll
from kv_policy import parse
from kv_transformers import CompressedCache
from kv_transformers.from_text import FULL
from kv_transformers.models import LoadedModel, load_model

OURS = "kv-compress:budget={C}"
ABLATIONS = (
    "kv-compress:budget={C},power=1",
    "kv-compress:budget={C},window=32",
    "kv-compress:budget={C},window=full",
    "kv-compress:budget={C},layers=even",
    "kv-compress:budget={C},pool=7",
)
EVEN = (
    "snapkv:budget={C}",
    "snapkv:budget={C},window=8,pool=7,pooling=max",
    "h2o:budget={C}",
    "scissorhands:budget={C}",
    "keyformer:budget={C}",
    "tova:budget={C}",
    "knorm:budget={C}",
    "keydiff:budget={C}",
    "expected-attention:budget={C}",
    "streaming:budget={C}",
)
SHARED = (
    "pyramidkv:budget={C}",
    "pyramidinfer:budget={C}",
    "zigzagkv:budget={C}",
    "ada-snapkv:budget={C}",
    "ada-pyramidkv:budget={C}",
    "cake:budget={C}",
)
ALONE = ("fastgen", "fastgen:recovery=0.8")
TOGETHER = 96  # caches of a prompt that are held at once: all are small


@dataclass(frozen=True)
class Size:
    """How much is run."""

    budgets: tuple[int, ...]
    kinds: dict[str, tuple[str, ...]]
    plans: dict[str, Plan]
    rates: tuple[int, ...]
    context: int

    @property
    def policies(self) -> tuple[str, ...]:
        """Every policy, the full cache first."""
        specs = [spec for each in self.kinds.values() for spec in each]
        made = [self.named(spec, budget) for budget in self.budgets for spec in specs]
        return (FULL, *made, *(str(parse(spec)) for spec in ALONE))

    @staticmethod
    def named(spec: str, budget: int) -> str:
        """A method at a budget, as the evaluation names it."""
        return str(parse(spec.format(C=budget)))


def full_size() -> Size:
    """What the committed figures come from."""
    both = ("aware", "agnostic")
    return Size(
        budgets=(128, 256, 512, 1024),
        kinds={"ours": (OURS,), "ablation": ABLATIONS, "even": EVEN, "shared": SHARED},
        plans={
            "needle": Plan((FULL,), ("needle",), both, length=4000, samples=4),
            "multikey": Plan((FULL,), ("multikey",), both, length=4000, samples=4),
            "nll": Plan(
                (FULL,), ("nll",), ("agnostic",), length=4000, samples=3, batch=3, continuation=48
            ),
        },
        rates=(2, 4, 8, 16),
        context=4096,
    )


def quick_size() -> Size:
    """A smoke run: the same steps on very little."""
    return Size(
        budgets=(64,),
        kinds={"ours": (OURS,), "ablation": ABLATIONS[:1], "even": EVEN[:2], "shared": SHARED[:1]},
        plans={
            "needle": Plan((FULL,), ("needle",), ("aware", "agnostic"), length=300, samples=1),
            "multikey": Plan((FULL,), ("multikey",), ("aware", "agnostic"), length=300, samples=1),
            "nll": Plan(
                (FULL,), ("nll",), ("agnostic",), length=160, samples=2, batch=2, continuation=4
            ),
        },
        rates=(2,),
        context=512,
    )


def finished(plan: Plan, journal: Journal, spec: str, task: str, setting: str) -> list[Finished]:
    """All samples of a policy in a cell."""
    found = [journal.get(spec, task, setting, i) for i in range(plan.samples)]
    return [entry for entry in found if entry is not None]


def judged(
    spec: str, kind: str, budget: int | None, parts: Sequence[tuple[Plan, Journal]]
) -> dict[str, object]:
    """Sum a policy up over the cells."""
    row: dict[str, object] = {"kind": kind, "policy": spec, "budget": budget}
    shares, held = [], []
    for plan, journal in parts:
        for task, setting in plan.pairs:
            mine = finished(plan, journal, spec, task, setting)
            score = fmean(entry.score for entry in mine)
            row[f"{task}_{setting}"] = score
            if task == "nll":
                full = fmean(e.score for e in finished(plan, journal, FULL, task, setting))
                score = math.exp(full - score)
            shares.append(score)
            held += [entry.kv_bytes / entry.full_bytes for entry in mine]
    return row | {"average": fmean(shares), "bytes": fmean(held)}


def page_rows(loaded: LoadedModel, size: Size) -> list[dict[str, object]]:
    """How many pages a compressed prompt holds, beside those that its budget asks for."""
    text = nll(loaded.tokenizer, default_text(), length=size.context, samples=1, seed=0)
    prompt, found = torch.tensor([text[0].prompt_ids]), []
    for rate in size.rates:
        cache = CompressedCache(loaded.model, f"kv-compress:rate={rate}")
        read(loaded.model, cache, prompt)
        memory = cache.memory()
        table_rows, page = memory.tokens.numel(), cache.runtime.layout.pages[0][0].tokens
        tokens = max(128, prompt.shape[1] // rate)
        found.append(
            {
                "kind": "pages",
                "rate": rate,
                "context": prompt.shape[1],
                "tokens": int(memory.tokens.sum()),
                "held": memory.pages_used,
                "kept_tokens_need": -(-int(memory.tokens.sum()) // page),
                "budget_needs": -(-tokens * table_rows // page),
                "spare": memory.pages_free,
                "kv_bytes": memory.total_bytes,
                "full_bytes": memory.full_bytes,
            }
        )
    return found


def summarize(size: Size, rows: Sequence[dict[str, object]]) -> dict[str, float]:
    """The figures that a document may quote."""
    figures = {}
    for budget in size.budgets:
        here = [row for row in rows if row.get("budget") == budget]
        ours = next(row for row in here if row["kind"] == "ours")
        others = [row for row in here if row["kind"] in ("even", "shared")]
        figures[f"avg_c{budget}"] = float(str(ours["average"]))
        figures[f"best_other_c{budget}"] = max(float(str(row["average"])) for row in others)
    pages = [row for row in rows if row["kind"] == "pages"]
    ratios = [float(str(row["held"])) / float(str(row["budget_needs"])) for row in pages]
    return figures | {"page_overhead_4k": max(ratios)}


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    parser.add_argument(
        "--only",
        choices=("needle", "multikey", "nll"),
        help="run a part, which a later run goes on from",
    )
    arguments = parser.parse_args()
    size = quick_size() if arguments.quick else full_size()
    loaded = load_model(progress=CONSOLE.print)
    parts = []
    for name, plan in size.plans.items():
        if arguments.only in (None, name):
            plan = replace(plan, policies=size.policies)
            part = f"kv_compress_quality.{name}" + (".quick" if arguments.quick else "")
            parts.append((plan, evaluated(loaded, plan, part, together=TOGETHER)))
    if arguments.only:
        return
    rows = [judged(FULL, "full", None, parts)]
    for budget in size.budgets:
        for kind, specs in size.kinds.items():
            rows += [judged(size.named(spec, budget), kind, budget, parts) for spec in specs]
    rows += [judged(str(parse(spec)), "alone", None, parts) for spec in ALONE]
    rows += page_rows(loaded, size)
    summary = summarize(size, rows)
    for name, value in summary.items():
        print(f"{name:24} {value:.4f}")
    _result.write("kv_compress_quality", summary, rows, quick=arguments.quick)
    for _, journal in parts:
        journal.remove()


if __name__ == "__main__":
    main()
