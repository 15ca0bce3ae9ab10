# environment: vllm
"""Answers of a busy engine: a stock vLLM on a CPU whose memory is full, its own caches and ours.

`vllm_quality` asks one request at a time, so memory never runs short. Here the same needles and
multikey prompts of 2,000 tokens, with the question inside, are asked all at once, among requests of
1,024 to 2,048 tokens, half as many, whose answers of 512 fill the memory meanwhile. So what a
policy does when memory is short, and what a preemption does, happens to answers that are judged.
Memory is that of two of the longest requests uncompressed. SmolLM2-135M; a score is the share of
numbers found, with Wilson's interval of 95 %. `vllm_throughput` takes from here which policies lose
nothing.
"""

from functools import partial
from pathlib import Path
from statistics import mean
from typing import Final

from _arguments import count
from _vllm_engine import Room
from _vllm_load import Load, raw_token_bytes
from _vllm_process import Row, Rows, apart
from _vllm_quality import answered_among
from _vllm_ways import BF16, FP8, arguments, figure, with_basis

from kv_eval.evaluate.intervals import of_mean
from kv_eval.evaluate.plan import Plan
from kv_eval.tasks import Sample, TaskName, default_text
from kv_transformers.from_text import FULL
from kv_transformers.models import load_model

TASKS: Final[tuple[TaskName, ...]] = ("needle", "multikey")
POLICIES: Final = (
    "kv-compress:rate=4+k8v4",
    *(f"kv-compress:rate={rate},short=true+k8v4" for rate in (2, 4, 6, 8)),
)


def beside(samples: int, *, quick: bool) -> Load:
    """The requests that fill the memory."""
    lengths = ((128, 256), (32, 32)) if quick else ((1024, 2048), (512, 512))
    return Load("beside", samples, *lengths)


def judged(samples: int, *, quick: bool) -> dict[str, tuple[Sample, ...]]:
    """The prompts whose answers are judged, by task."""
    loaded, text = load_model(), default_text()
    size = {"length": 300} if quick else {}
    plan = Plan((FULL,), TASKS, ("aware",), samples=samples, **size)
    return {task: plan.samples_of(loaded, text, task, "aware") for task in TASKS}


def measure(
    policies: list[str],
    basis: Path | None,
    samples: int,
    *,
    quick: bool,
    minutes: float | None = None,
) -> Rows:
    """Let every way answer the same requests."""
    ways = (BF16, *(() if quick else (FP8,)), *with_basis(policies, basis))
    tasks, load = judged(samples, quick=quick), beside(samples, quick=quick)
    every = [sample for each in tasks.values() for sample in each]
    longest = max(load.longest, *(s.length + s.new_tokens for s in every))
    room = Room(2 * longest * raw_token_bytes(), longest)
    rows = Rows(
        "vllm_loaded",
        {"ways": ways, "load": str(load), "room": str(room)},
        quick=quick,
        minutes=minutes,
    )
    for way in ways:
        key: Row = {"kind": "loaded", "way": figure(way), "kv_bytes": room.kv_bytes}
        rows.measured(key, partial(apart, answered_among, way, room, tasks, load.asks()))
    return rows


def scores(rows: list[Row]) -> list[Row]:
    """The shares with their intervals."""
    found: list[Row] = []
    for row in rows:
        for task in TASKS:
            each = row[task]
            assert isinstance(each, list)
            about: Row = {"kind": "score", "task": task, "way": row["way"]}
            found.append({**about, "score": mean(each), "interval": of_mean(each)})
    return found


def main() -> None:
    """Run everything and write the result."""
    parser = arguments(__doc__, POLICIES)
    parser.add_argument("--samples", type=count, help="of each task; 64, and 2 in a quick run")
    given = parser.parse_args()
    usual = 2 if given.quick else 64
    samples = usual if given.samples is None else given.samples
    rows = measure(given.policies, given.basis, samples, quick=given.quick, minutes=given.minutes)
    table = scores(rows.rows)
    rows.rows += table
    rows.finish({f"{row['task']}_{row['way']}": float(str(row["score"])) for row in table})


if __name__ == "__main__":
    main()
