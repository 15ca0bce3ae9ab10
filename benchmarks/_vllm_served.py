"""What a run of many requests under several caches comes to, as ratios and the best of a group."""

from statistics import mean

import _result
from _vllm_engine import Room
from _vllm_load import Load, raw_token_bytes
from _vllm_process import Row
from _vllm_ways import BF16, FP8

from kv_serve.calibrate.loss import loss

HELD = 4  # requests of mean length, when they end
GROUPS = {"lossless": 0.0, "loss5": 0.05}  # what of an answer task's score may be lost
TASKS = ("needle", "multikey")


def room_of(load: Load, *, compiled: bool) -> Room:
    """The memory of a load, the same for all."""
    return Room(int(HELD * load.mean) * raw_token_bytes(), load.longest, compiled=compiled)


def ratio(rows: list[Row], load: str, way: str, over: str) -> float:
    """The mean of the ratios of the rounds that both ran in."""
    found: dict[str, dict[object, float]] = {way: {}, over: {}}
    for row in rows:
        if row["kind"] == "served" and row["load"] == load and row["way"] in found:
            found[str(row["way"])][row["round"]] = float(str(row["tokens_per_s"]))
    both = found[way].keys() & found[over].keys()
    return mean(found[way][i] / found[over][i] for i in both)


def losing() -> dict[str, set[str]]:
    """By group, the policies that lose no more than it allows, under vLLM.

    Raises:
        FileNotFoundError: the benchmark `vllm_quality` has not been run.
    """
    measured = _result.rows_of("vllm_quality")
    scores = {row["way"]: row for row in measured if row["kind"] == "vllm"}
    stock = scores.pop(BF16)
    return {
        group: {
            way
            for way, mine in scores.items()
            if all(loss(mine[task], stock[task], task).within(allowed) for task in TASKS)
        }
        for group, allowed in GROUPS.items()
    }


def best(rows: list[Row], load: str, groups: dict[str, set[str]]) -> list[Row]:
    """For each group the policy that serves the most tokens a second."""
    ways = {str(row["way"]) for row in rows if row["kind"] == "served"} - {BF16, FP8}
    found: list[Row] = []
    for group, names in groups.items():
        mine = {way: ratio(rows, load, way, BF16) for way in sorted(names & ways)}
        if mine:
            found.append({"kind": "best", "group": group, "way": max(mine, key=mine.__getitem__)})
    return found


def headline(rows: list[Row], load: str) -> dict[str, float]:
    """The best of each group over each of vLLM's own caches."""
    return {
        f"{row['group']}_vs_{over}": ratio(rows, load, str(row["way"]), over)
        for row in rows
        if row["kind"] == "best"
        for over in (BF16, FP8)
    }
