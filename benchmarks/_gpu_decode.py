"""Decode steps, skewed heads, observed prompts and the page manager, as `gpu` measures them."""

from typing import Final

import gpu
from _gpu_child import Report, free
from _gpu_tiles import chosen
from gpu import Clock

CASES: Final = (*gpu.SHAPES, "skewed", "scores", "manager")
ROOM: Final = 3.2  # times the bytes of keys and values in bfloat16 that a shape takes


def fits(report: Report, batch: int, tokens: int) -> bool:
    """Whether a shape fits in the memory that is free; a row says so if not."""
    if report.device == "cpu":
        return True
    import torch

    free()
    need = ROOM * 2 * batch * tokens * gpu.HEADS * gpu.DIM * 2
    there = torch.cuda.mem_get_info()[0]
    if need > there:
        why = f"it takes {need / 2**30:.0f} GiB, and {there / 2**30:.0f} are free"
        report.add("left out", case=f"{batch}x{tokens}", why=why)
    return need <= there


def measured(report: Report, case: str) -> None:
    """Measure a shape of decode steps, or something else."""
    clock, quick = Clock(report.device), report.quick
    with chosen():
        if case in gpu.SHAPES:
            batch, tokens = next(iter(gpu.QUICK.values())) if quick else gpu.SHAPES[case]
            if not fits(report, batch, tokens):
                return
            gbps = gpu.copy_gbps(clock, quick=quick)
            free()
            rows = gpu.decoded(clock, gbps, case, batch, tokens)
        else:
            what = {"skewed": gpu.skewed, "scores": gpu.scores, "manager": gpu.manager}[case]
            rows = what(clock, quick=quick)
    for row in rows:
        kind = str(row.pop("kind"))
        report.add(kind, **row)
