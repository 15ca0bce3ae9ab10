# environment: vllm
"""Answers and texts under vLLM, beside the same samples and policies under transformers.

SmolLM2-135M, prompts of 2,000 tokens: `needle` and `multikey` with the question inside the prompt
(share of numbers found) and `nll` (nats per token of the 256 tokens that follow). One request at a
time, in steps of as many tokens as a prompt has, so a prompt is one step, as it is one pass under
transformers, and the tokens scored by `nll` are a second one. What differs by construction: under
transformers the last part of a prompt, from which the first token is predicted, is read after the
rest was compressed, and scored tokens come one by one; under vLLM both come in one step, which sees
its own tokens uncompressed. What `bf16` and `full` differ by, neither of which compresses, is what
two programs of the same model differ by anyway.

Intervals are of 95 %: Wilson's for shares; for nats that of the mean difference to bf16, sample by
sample.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TypeAlias, cast

from _evaluation import evaluated
from _vllm_engine import Room
from _vllm_load import raw_token_bytes
from _vllm_process import Row, Rows, apart
from _vllm_quality import interval, scores
from _vllm_ways import BF16, FP8, arguments, figure, with_basis

from kv_eval.evaluate.intervals import of_mean
from kv_eval.evaluate.plan import Plan
from kv_eval.evaluate.specs import read_specs
from kv_eval.tasks import Sample, Setting, TaskName, default_text
from kv_transformers.from_text import FULL
from kv_transformers.models import LoadedModel, load_model

POLICIES = (
    "k8v4",
    "k4v4",
    "k4v2",
    "leankv",
    "kv-compress:rate=2+k8v4",
    "kv-compress:rate=4+k8v4",
    "kv-compress:rate=8+k8v4",
    "{zack}",
    "kv-compress:rate=4+{zack}+k8v4",
)
Tasks: TypeAlias = dict[str, Sequence[Sample]]
Scores: TypeAlias = dict[str, list[float]]
PAIRS: tuple[tuple[TaskName, Setting], ...] = (
    ("needle", "aware"),
    ("multikey", "aware"),
    ("nll", "agnostic"),
)


def plans(policies: Sequence[str], *, quick: bool) -> list[Plan]:
    """One for each task, in its setting."""
    specs = read_specs(policies)
    size = {"length": 300, "samples": 2, "continuation": 16} if quick else {"samples": 16}
    return [Plan(specs, (task,), (setting,), **size) for task, setting in PAIRS]


def under_vllm(rows: Rows, tasks: Tasks, length: int, way: str) -> Scores:
    """The scores of a way to store; one engine answers all tasks."""
    every = [sample for samples in tasks.values() for sample in samples]
    longest = max(s.length + len(s.target_ids) + max(s.new_tokens, 1) for s in every)
    held = 2 * longest + 1024  # a prompt has room before anything of it was compressed
    room = Room(held * raw_token_bytes(), longest, chunk=length, together=1)
    key: Row = {"kind": "vllm", "way": figure(way), "length": length}
    return cast(Scores, rows.measured(key, lambda: dict(apart(scores, way, room, tasks))))


def under_transformers(rows: Rows, loaded: LoadedModel, plan: Plan) -> dict[str, list[float]]:
    """The scores of every policy and of transformers' own cache in one task."""
    task, setting = plan.pairs[0]
    key: Row = {"kind": "transformers", "task": task, "length": plan.length}

    def measure() -> Row:
        journal = evaluated(loaded, plan, f"{rows.name}.{task}{'.quick' if rows.quick else ''}")
        found = {}
        for spec in plan.policies:
            entries = [journal.get(spec, task, setting, i) for i in range(plan.samples)]
            found[figure(spec)] = [entry.score for entry in entries if entry is not None]
        journal.remove()
        return dict(found)

    return cast(Scores, rows.measured(key, measure))


def compared(task: str, mine: list[float], stock: list[float]) -> Row:
    """A score with its interval."""
    if task == "nll":
        low, high = interval([a - b for a, b in zip(mine, stock, strict=True)])
        return {"score": mean(mine), "over_stock": [low, high]}
    return {"score": mean(mine), "interval": of_mean(mine)}


def measure(
    policies: list[str], basis: Path | None, *, quick: bool, minutes: float | None = None
) -> tuple[Rows, list[Row]]:
    """Score everything; also give the rows of the table."""
    policies = list(with_basis(policies, basis))
    loaded = load_model()
    made = plans(policies, quick=quick)
    rows = Rows(
        "vllm_quality", {"policies": policies, "plans": str(made)}, quick=quick, minutes=minutes
    )
    tasks: Tasks = {
        plan.tasks[0]: plan.samples_of(loaded, default_text(), *plan.pairs[0]) for plan in made
    }
    theirs = {plan.tasks[0]: under_transformers(rows, loaded, plan) for plan in made}
    table: list[Row] = []
    ways = (BF16, *(() if quick else (FP8,)), *made[0].policies[1:])
    ours = {way: under_vllm(rows, tasks, made[0].length, way) for way in ways}
    for task, beside in theirs.items():
        for way in ways:
            row: Row = {"kind": "score", "task": task, "way": figure(way)}
            mine = compared(task, ours[way][task], ours[BF16][task])
            row |= {f"vllm_{name}": value for name, value in mine.items()}
            other = beside.get(FULL if way == BF16 else figure(way))
            if other is not None:  # fp8 is vLLM's alone
                its = compared(task, other, beside[FULL])
                row |= {f"transformers_{name}": value for name, value in its.items()}
            table.append(row)
    return rows, table


def figures(table: list[Row]) -> dict[str, float]:
    """The shares that were found under vLLM; of nats, how many more than under stock."""
    stock = {row["task"]: float(str(row["vllm_score"])) for row in table if row["way"] == BF16}
    found = {}
    for row in table:
        task, score = str(row["task"]), float(str(row["vllm_score"]))
        if row["way"] == BF16:
            found[f"{task}_bf16"] = score
            found[f"{task}_bf16_transformers"] = float(str(row["transformers_score"]))
        elif task == "nll":
            found[f"nll_{row['way']}_over_bf16"] = score - stock[task]
        else:
            found[f"{task}_{row['way']}"] = score
    return found


def main() -> None:
    """Run everything and write the result."""
    given = arguments(__doc__, POLICIES).parse_args()
    rows, table = measure(given.policies, given.basis, quick=given.quick, minutes=given.minutes)
    rows.rows += table
    rows.finish(figures(table))


if __name__ == "__main__":
    main()
