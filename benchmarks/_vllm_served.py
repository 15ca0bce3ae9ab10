"""What runs of many requests under several caches come to, as ratios and the best of a group."""

from statistics import median

import _result
from _vllm_engine import Room
from _vllm_load import Load, raw_token_bytes
from _vllm_process import Row
from _vllm_ways import BF16, FP8

from kv_eval.calibrate.loss import loss

HELD = 4  # requests of mean length, when they end
GROUPS = {"lossless": 0.0, "loss5": 0.05}  # what of an answer task's score may be lost
TASKS = ("needle", "multikey")


def room_of(load: Load, *, compiled: bool) -> Room:
    """The memory of a load, the same for all."""
    return Room(int(HELD * load.mean) * raw_token_bytes(), load.longest, compiled=compiled)


def rates(rows: list[Row]) -> dict[str, float]:
    """Output tokens a second of every cache, the median of its rounds."""
    found: dict[str, list[float]] = {}
    for row in (row for row in rows if row["kind"] == "served"):
        found.setdefault(str(row["way"]), []).append(float(str(row["tokens_per_s"])))
    return {way: median(each) for way, each in found.items()}


def over_bf16(rows: list[Row]) -> dict[str, float]:
    """How many times the tokens a second of stock bf16 every other cache gives."""
    found = rates(rows)
    stock = found.pop(BF16)
    return {f"{way}_vs_bf16": rate / stock for way, rate in found.items()}


def losing() -> dict[str, set[str]]:
    """By group, the policies that lose no more than it allows, in a busy engine of vLLM.

    Raises:
        FileNotFoundError: the benchmark `vllm_loaded` has not been run.
    """
    measured = _result.rows_of("vllm_loaded")
    scores = {row["way"]: row for row in measured if row["kind"] == "loaded"}
    stock = scores.pop(BF16)
    return {
        group: {
            way
            for way, mine in scores.items()
            if all(loss(mine[task], stock[task], task).within(allowed) for task in TASKS)
        }
        for group, allowed in GROUPS.items()
    }


def best(rows: list[Row], groups: dict[str, set[str]]) -> list[Row]:
    """For each group the policy that gives the most tokens a second."""
    found = rates(rows)
    ways = found.keys() - {BF16, FP8}
    return [
        {"kind": "best", "group": group, "way": max(sorted(names & ways), key=found.__getitem__)}
        for group, names in groups.items()
        if names & ways
    ]


def headline(rows: list[Row]) -> dict[str, float]:
    """The best of each group over each of vLLM's own caches."""
    found = rates(rows)
    return {
        f"{row['group']}_vs_{over}": found[str(row["way"])] / found[over]
        for row in rows
        if row["kind"] == "best"
        for over in (BF16, FP8)
    }
