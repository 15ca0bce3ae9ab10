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

from _evaluation import evaluated
from _vllm_engine import Room
from _vllm_load import raw_token_bytes
from _vllm_process import Row, Rows, apart
from _vllm_quality import interval, scores, wilson
from _vllm_ways import BF16, FP8, arguments, figure, with_basis

from kv_serve.evaluate.plan import Plan
from kv_serve.evaluate.specs import FULL, read_specs
from kv_serve.models import LoadedModel, load_model
from kv_serve.tasks import Sample, Setting, TaskName, default_text

POLICIES = (
    "k8v4",
    "k4v2",
    "leankv",
    "kv-compress:rate=2+k8v4",
    "kv-compress:rate=4+k8v4",
    "kv-compress:rate=8+k8v4",
    "{zack}",
    "kv-compress:rate=4+{zack}+k8v4",
)
PAIRS: tuple[tuple[TaskName, Setting], ...] = (
    ("needle", "aware"),
    ("multikey", "aware"),
    ("nll", "agnostic"),
)


def plans(policies: Sequence[str], *, quick: bool) -> list[Plan]:
    """One for each task, in its setting."""
    specs = read_specs(policies)
    size = {"length": 300, "samples": 2, "continuation": 16} if quick else {"samples": 50}
    return [Plan(specs, (task,), (setting,), **size) for task, setting in PAIRS]


def under_vllm(rows: Rows, loaded: LoadedModel, plan: Plan, way: str) -> list[float]:
    """The scores of a way to store; the samples stand in the file of rows as one row."""
    ((task, setting),) = plan.pairs
    samples: Sequence[Sample] = plan.samples_of(loaded, default_text(), task, setting)
    longest = max(s.length + len(s.target_ids) + s.new_tokens for s in samples) + 1
    held = 2 * longest + 1024  # room for a prompt before anything of it was compressed
    room = Room(held * raw_token_bytes(), longest=longest, chunk=plan.length, together=1)
    key: Row = {"kind": "vllm", "task": task, "way": figure(way), "length": plan.length}
    row = rows.measured(key, lambda: {"scores": apart(scores, way, room, samples)})
    found = row["scores"]
    assert isinstance(found, list)
    return found


def under_transformers(rows: Rows, loaded: LoadedModel, plan: Plan) -> dict[str, list[float]]:
    """The scores of every policy and of transformers' own cache."""
    ((task, setting),) = plan.pairs
    key: Row = {"kind": "transformers", "task": task, "length": plan.length}

    def measure() -> Row:
        name = f"vllm_quality.{task}{'.quick' if plan.length < 1000 else ''}"
        journal = evaluated(loaded, plan, name)
        found = {}
        for spec in plan.policies:
            entries = [journal.get(spec, task, setting, i) for i in range(plan.samples)]
            found[figure(spec)] = [entry.score for entry in entries if entry is not None]
        journal.remove()
        return {"scores": found}

    found = rows.measured(key, measure)["scores"]
    assert isinstance(found, dict)
    return found


def compared(task: str, mine: list[float], stock: list[float]) -> Row:
    """A score with its interval."""
    if task == "nll":
        low, high = interval([a - b for a, b in zip(mine, stock, strict=True)])
        return {"score": mean(mine), "over_stock": [low, high]}
    return {"score": mean(mine), "interval": list(wilson(round(sum(mine)), len(mine)))}


def measure(policies: list[str], basis: Path | None, *, quick: bool) -> tuple[Rows, list[Row]]:
    """Score everything; also give the rows of the table."""
    policies = list(with_basis(policies, basis))
    loaded = load_model()
    made = plans(policies, quick=quick)
    rows = Rows("vllm_quality", {"policies": policies, "plans": str(made)}, quick=quick)
    table: list[Row] = []
    for plan in made:
        task = plan.tasks[0]
        theirs = under_transformers(rows, loaded, plan)
        stock = under_vllm(rows, loaded, plan, BF16)
        for way in (BF16, FP8, *plan.policies[1:]):
            mine = under_vllm(rows, loaded, plan, way)
            other = theirs.get(FULL if way == BF16 else figure(way))
            row: Row = {"kind": "score", "task": task, "way": figure(way), "samples": len(mine)}
            row |= {f"vllm_{k}": v for k, v in compared(task, mine, stock).items()}
            if other is not None:  # fp8 is vLLM's alone
                beside = compared(task, other, theirs[FULL])
                row |= {f"transformers_{k}": v for k, v in beside.items()}
            table.append(row)
    return rows, table


def figures(table: list[Row]) -> dict[str, float]:
    """A score under vLLM over stock's, which is below 1 for worse answers; for nats, their rise."""
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
    rows, table = measure(given.policies, given.basis, quick=given.quick)
    rows.rows += table
    rows.finish(figures(table))


if __name__ == "__main__":
    main()
