"""LeanKV on SmolLM2: quality against bytes held, beside uniform formats and equal budgets.

Every row is one policy on one task, as `kv-serve eval` would give it, with all of its samples.
Bytes are what a cache holds after the prompt, by its own accounting: vectors, metadata, scores,
positions, unfilled and spare pages, the raw window, page tables.

`neutral` is within the noise of the full cache on all three tasks, `loss5` within 5 % of it on all
of them, by the rule of `kv-serve calibrate` (`kv_eval.calibrate.loss`).

A row `equal` keeps as many tokens of every prompt as the `leankv` row of the same parameters, but
the same number of them in each head, by the same scores: what H2O does, on equal bytes.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar, Literal

import _result
import msgspec
import torch
from _evaluation import CONSOLE, evaluated, samples_of
from jaxtyping import Float, UInt8
from torch import Tensor

from kv_eval.calibrate.loss import loss
from kv_eval.evaluate.journal import Journal
from kv_eval.evaluate.plan import Plan
from kv_eval.evaluate.report import rows as report_rows
from kv_evict import LeanKV
from kv_policy import DROP, NOBODY, PlanView, Step, StepView, best, parse
from kv_transformers import CompressedCache
from kv_transformers.from_text import FULL, make_cache
from kv_transformers.models import load_model

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

UNIFORM = ("k8v8", "k8v4", "k4v4", "k4v2", "k2v4", "k4v4:keys=channel")
THRESHOLDS = tuple(f"leankv:t_high={t}" for t in (0.1, 0.2, 0.4, 0.7))
SIGNIFICANCE = tuple(f"leankv:t_high=0.2,{s}" for s in ("last=none", "last=32", "group=mean"))
WINDOWS = tuple(f"leankv:t_high={t},window={w}" for t, w in ((0.2, 32), (0.2, 16), (0.1, 16)))
PRUNED = ("leankv:t_high=0.2,t_low=0.001",)
PAIRS = (
    "leankv:high=k8v8,low=k8v4,t_high=0.2",
    "leankv:high=k4v2,low=k4v1,t_high=0.2",
    "leankv:low=drop,t_high=0.005",
)
CHANNEL = (
    "leankv:high=k4v4:keys=channel,t_high=0.2",
    "leankv:high=k4v4:keys=channel,low=k4v2:keys=channel,t_high=0.2",
)
DYNAMIC = tuple(f"leankv:high=raw,low=drop,t_high={t}" for t in (0.001, 0.005, 0.02, 0.05, 0.2))


@dataclass(frozen=True)
class EqualBudget(LeanKV):
    """Keeps as many tokens of a prompt as LeanKV would, and the same number in each head."""

    name: ClassVar[str] = "equal"

    @property
    def scope(self) -> Literal["layer", "model"]:
        """How many tokens LeanKV keeps of a prompt is a matter of all layers."""
        return "model"

    def plan(self, view: PlanView) -> UInt8[Tensor, "N B H L"]:
        """Keep the best of those outside the window, LeanKV's number of them on average."""
        here = view.position >= 0
        count = (super().plan(view) != DROP).sum(-1).double().mean((0, 2)).round().long()
        score = view.score.masked_fill(~here, -torch.inf)
        kept = best(score, count[None, :, None].expand(here.shape[:-1])) & here
        return torch.where(kept, 0, DROP).to(torch.uint8)

    def tier_thresholds(self, view: PlanView) -> Float[Tensor, "K N B H"]:
        """The share of its tokens that a head kept."""
        kept = (self.plan(view) != DROP).sum(-1)
        return (kept / (view.position >= 0).sum(-1).clamp(min=1))[None].float()

    def step(self, view: StepView) -> Step:
        """Take the candidate in, and let the weakest go where there are enough."""
        most = (view.length - self.window).clamp(min=0)[None, :, None] * view.tier_thresholds[0]
        enough = view.count[0] >= most
        weaker = enough & (view.candidate <= view.weakest[0])
        candidate = torch.where(weaker, DROP, 0).to(torch.uint8)
        victim = torch.where(enough & ~weaker, 0, NOBODY).to(torch.uint8)
        return Step(candidate, victim, torch.full_like(victim, DROP))


def make(model: "PreTrainedModel", spec: str) -> "Cache":
    """Make an empty cache; equal budgets are not a policy people can name."""
    name, _, options = spec.partition(":")
    if name == EqualBudget.name:
        given = dict(option.split("=") for option in options.split(","))
        return CompressedCache(model, EqualBudget.from_text(given))
    return make_cache(model, spec)


@dataclass(frozen=True)
class Size:
    """How much is run."""

    policies: tuple[str, ...]
    dynamic: tuple[str, ...]
    plans: dict[str, Plan]


def full_size() -> Size:
    """What the committed figures come from."""
    named = (*UNIFORM, *THRESHOLDS, *SIGNIFICANCE, *WINDOWS, *PRUNED, *PAIRS, *CHANNEL)
    return Size(
        policies=(FULL, *(str(parse(spec)) for spec in named)),
        dynamic=tuple(str(parse(spec)) for spec in DYNAMIC),
        plans={
            "needle": Plan((FULL,), ("needle",), ("aware",), length=2000, samples=10),
            "multikey": Plan((FULL,), ("multikey",), ("aware",), length=2000, samples=10),
            "nll": Plan(
                (FULL,), ("nll",), ("agnostic",), length=1024, samples=6, batch=6, continuation=96
            ),
        },
    )


def quick_size() -> Size:
    """A smoke run: the same steps on very little."""
    named = ("k8v4", "k4v4", "leankv:t_high=0.2")
    return Size(
        policies=(FULL, *(str(parse(spec)) for spec in named)),
        dynamic=(str(parse(DYNAMIC[0])),),
        plans={
            "needle": Plan((FULL,), ("needle",), ("aware",), length=300, samples=1),
            "multikey": Plan((FULL,), ("multikey",), ("aware",), length=300, samples=1),
            "nll": Plan(
                (FULL,), ("nll",), ("agnostic",), length=160, samples=2, batch=2, continuation=4
            ),
        },
    )


def equal(spec: str) -> str:
    """Name the equal budget that keeps as much as a dynamic policy."""
    return f"{EqualBudget.name}:{spec.partition(':')[2]}"


def judged(spec: str, parts: Sequence[tuple[Plan, Journal]]) -> dict[str, object]:
    """Sum a policy up over the tasks."""
    pairs = [pair for plan, journal in parts for pair in samples_of(plan, journal, spec)]
    row: dict[str, object] = {"kind": "policy", "policy": spec}
    neutral = loss5 = True
    for task in ("needle", "multikey", "nll"):
        mine = [(a.score, b.score) for a, b in pairs if a.task == task]
        held = [a.kv_bytes / a.full_bytes for a, _ in pairs if a.task == task]
        found = loss([a for a, _ in mine], [b for _, b in mine], task)
        row |= {task: fmean(a for a, _ in mine), f"{task}_bytes": fmean(held)}
        row |= {f"{task}_lost": found.mean, f"{task}_noise": found.noise}
        neutral &= found.within(0)
        loss5 &= found.within(0.05)
    # The prompts of the answers are the longest; the figure is theirs.
    held = [a.kv_bytes / a.full_bytes for a, _ in pairs if a.task != "nll"]
    return row | {"bytes": fmean(held), "neutral": neutral, "loss5": loss5}


def summarize(rows: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """The figures that a document may quote."""
    table = {str(row["policy"]): row for row in rows if row["kind"] == "policy"}

    def least(mark: str) -> Mapping[str, object]:
        good = [row for spec, row in table.items() if row[mark] and spec.startswith("leankv")]
        return min(good, key=lambda row: float(str(row["bytes"])), default=table[FULL])

    figures = {"lossless_bytes": least("neutral")["bytes"], "loss5_bytes": least("loss5")["bytes"]}
    for name in ("k8v4", "k4v4"):
        figures[f"uniform_{name}_bytes"] = table[name]["bytes"]
    return {name: float(str(value)) for name, value in figures.items()}


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
    pairs = [(spec, equal(spec)) for spec in size.dynamic]
    policies = (*size.policies, *(spec for pair in pairs for spec in pair))
    parts = []
    for name, plan in size.plans.items():
        if arguments.only in (None, name):
            plan = replace(plan, policies=policies)
            part = f"leankv_quality.{name}" + (".quick" if arguments.quick else "")
            parts.append((plan, evaluated(loaded, plan, part, make)))
    if arguments.only:
        return
    rows: list[dict[str, object]] = [judged(spec, parts) for spec in policies]
    rows += [{"kind": "equal", "policy": a, "equal": b} for a, b in pairs]
    for plan, journal in parts:
        rows += [{"kind": r.task, **msgspec.to_builtins(r)} for r in report_rows(plan, journal)]
    summary = summarize(rows)
    for name, value in summary.items():
        print(f"{name:24} {value:.4f}")
    _result.write("leankv_quality", summary, rows, quick=arguments.quick)
    for _, journal in parts:
        journal.remove()


if __name__ == "__main__":
    main()
