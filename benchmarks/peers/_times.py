"""Seconds of passes and steps, over those of the full cache in the same process."""

from collections.abc import Sequence
from statistics import median

from _samples import Samples, asks
from _scripts import Run
from _ways import TIMED
from _work import FULL, Cell, Row, Work

CELL = ("needle", "aware")  # whose first prompt is read
PARTS = ("prefill", "decode")


def clocked(
    run: Run, samples: Samples, chosen: Sequence[str] | None, rounds: int
) -> tuple[dict[str, float], list[Row]]:
    """Time the ways of each environment in turn: ratios of medians, and rows with the seconds."""
    summary: dict[str, float] = {}
    rows: list[Row] = []
    for name in chosen or TIMED:
        cell = Cell(*CELL, TIMED[name], asks(samples[CELL][:1]))
        work = Work(run.model, run.ends, (cell,), rounds=rounds)
        found = [row for row in run.rows(name, work) if "round" in row]
        for part in PARTS:
            took = {
                way: median(row[part] for row in found if row["way"] == way) for way in TIMED[name]
            }
            for way, seconds in took.items():
                ratio = seconds / took[FULL]
                head = {"environment": name, "way": way, "part": part}
                rows.append({**head, "seconds": seconds, "ratio": ratio})
                if way != FULL:
                    summary[f"{part}_{name}_{plain(way)}"] = ratio
    for key, value in summary.items():
        print(f"{key:60} {value:.4f}")
    return summary, rows


def plain(way: str) -> str:
    """Give a name for figures.

    >>> plain("snapkv-pool21:keep=0.88+quanto4")
    'snapkv_pool21_keep_0_88_quanto4'
    """
    return "_".join("".join(c if c.isalnum() else " " for c in way).split())
