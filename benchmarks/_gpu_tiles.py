"""A short tuning of tiles, as `gpu_tune` does at length.

Cases `compile 0`, `compile 1`, ... compile what the case `choose` times, in processes beside each
other. The table that is chosen goes to the file named by KV_GPU_TILES, and is used by later parts
only if the kernels are still right with it.
"""

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import gpu_tune
import torch
from _gpu_child import Report
from gpu import Clock

from kv_attention.gpu import tuning
from kv_policy.files import write_whole

FILE: Final = "KV_GPU_TILES"
COMPILING: Final = 6  # processes
SHORT: Final = {
    "decode": {"block": (32, 64, 128), "warps": (4, 8), "stages": (1, 2, 3)},
    "prompt": {"block": (64, 128), "warps": (4, 8), "stages": (2,), "queries": (64,)},
    "attention_mass": {"block": (64, 128), "warps": (4, 8), "stages": (1,), "queries": (64,)},
}
CHECKED: Final = ("d128 raw", "d128 k8v4", "d128 k4v2", "d128 k8v4 mass")


def chosen() -> AbstractContextManager[Any]:
    """Let kernels read the table of this run, if there is one."""
    path = Path(os.environ.get(FILE, ""))
    if not path.is_file():
        return nullcontext()
    return gpu_tune.using(json.loads(path.read_text()))


def tile(report: Report, case: str) -> None:
    """Compile a share of all choices, or choose."""
    with patch.object(gpu_tune, "CHOICES", SHORT), patch.object(gpu_tune, "ROUNDS", 5):
        if case == "choose":
            _choose(report)
        else:
            _compile(report, int(case.split()[1]))


def _kinds(report: Report) -> Iterator[tuple[str, str, gpu_tune.Pass]]:
    every = gpu_tune.kinds(report.device, quick=report.quick)
    return islice(every, 1) if report.quick else every


def _compile(report: Report, share: int) -> None:
    """Run every sixth choice once, which leaves it in Triton's cache on disk."""
    architecture = tuning.machine_of(torch.device(report.device)).architecture
    table, tried = tuning.tuned(), 0
    for kernel, kind, once in _kinds(report):
        every = gpu_tune.choices(kernel, quick=report.quick)
        for each in every[share::COMPILING]:
            if report.left < 0:
                report.add("left out", case=f"{kernel} {kind} {each}", why="no time is left")
                return
            with report.trying(f"{kernel} {kind} {each}"):
                where = ("tiles", architecture, kernel, kind)
                gpu_tune.fits(gpu_tune.changed(table, where, each), once)
                tried += 1
    report.add("compiled", tried=tried)


def _choose(report: Report) -> None:
    import _gpu_right

    clock, device = Clock(report.device), torch.device(report.device)
    architecture = tuning.machine_of(device).architecture
    table, decode = json.loads(json.dumps(tuning.tuned())), []
    for kernel, kind, once in _kinds(report):
        if report.left < 5:
            report.add("left out", case=f"{kernel} {kind}", why="no time is left")
            continue
        with report.trying(f"{kernel} {kind}"):
            where = ("tiles", architecture, kernel, kind)
            every = gpu_tune.choices(kernel, quick=report.quick)
            tables = {str(each): gpu_tune.changed(table, where, each) for each in every}
            tables["as it was"] = table
            name, seconds = gpu_tune.fastest(clock, tables, once)
            table = tables[name]
            report.add("tiles", kernel=kernel, of=kind, fastest=name, seconds=seconds)
        if kernel == "decode":
            decode.append(once)
    if report.device != "cpu" and decode and report.left > 5:
        with report.trying("programs"):
            each = {
                str(n): gpu_tune.changed(table, ("programs", architecture), n)
                for n in gpu_tune.PROGRAMS
            }
            found = [gpu_tune.fastest(clock, each, once)[1] for once in decode]
            total = {name: sum(one[name] / min(one.values()) for one in found) for name in each}
            best = min(total, key=total.__getitem__)
            table = each[best]
            report.add("programs", fastest=best, over_best=total)
    decode.clear()
    wrong: list[str] = []
    with gpu_tune.using(table):
        for name in CHECKED[:1] if report.quick else CHECKED:
            _gpu_right.right(Watched(report, wrong), name)
    if wrong:
        report.add("failed", what="tiles", error=f"wrong with these tiles: {wrong}")
    elif os.environ.get(FILE):
        write_whole(Path(os.environ[FILE]), f"{json.dumps(table, indent=2)}\n".encode())
    report.add("chosen", used=not wrong, table=table["tiles"].get(architecture))


class Watched(Report):
    """A report that knows which rows were wrong."""

    def __init__(self, of: Report, wrong: list[str]) -> None:
        """Write where another one does."""
        super().__init__(of.part, of.device, of.quick, of.until, of.path)
        self.wrong = wrong

    def add(self, kind: str, **fields: object) -> None:
        """Write a row."""
        if kind == "failed" or not fields.get("ok", True):
            self.wrong.append(str(fields.get("case", fields.get("what"))))
        super().add(kind, **fields)
