"""A process that does some cases of a part of `gpu_first`, and reports row by row.

A row is on disk once it is known, so nothing is lost with the process. Before each case comes a
row of the kind `begun`, so that whoever started this process can go on behind a case that ended it.
"""

import argparse
import faulthandler
import json
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Final

import _bare
import torch

FATAL: Final = 3  # the exit code of a process whose device is unusable
LINES: Final = 60  # of a traceback that are kept, from its end
OUT_OF_MEMORY: Final = (torch.OutOfMemoryError, MemoryError)
# What a part does with one of its cases, by the part's name.
PARTS: Final[Mapping[str, str]] = {
    "machine": "_gpu_machine:machine",
    "right": "_gpu_right:right",
    "tune": "_gpu_tiles:tile",
    "decode": "_gpu_decode:measured",
    "rivals": "_gpu_rivals:rival",
    "steps": "_gpu_steps:counted",
    "generate": "_gpu_generate:generated",
    "vllm": "_gpu_vllm:served",
}


@dataclass
class Report:
    """Where a part says what it found, and how long it may take."""

    part: str
    device: str
    quick: bool  # a rehearsal
    until: float  # by `monotonic`
    path: Path = field(repr=False)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.until - monotonic()

    def add(self, kind: str, **fields: object) -> None:
        """Write a row."""
        row = {"kind": kind, "part": self.part, **fields}
        with self.path.open("a") as file:
            file.write(f"{json.dumps(finite(row), default=str)}\n")

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """Keep an error as a row, and go on; an unusable device ends the process."""
        try:
            yield
        except Exception as error:  # anything may fail on an unknown machine
            self.failed(what, error)
            if isinstance(error, OUT_OF_MEMORY):
                free()
            elif not usable(self.device):
                print(f"{what}: the device is unusable from here on", flush=True)
                os._exit(FATAL)  # torch's own destructors may hang on such a device

    def failed(self, what: str, error: BaseException) -> None:
        """Write how something failed."""
        lines = "".join(traceback.format_exception(error)).splitlines()
        text = f"{type(error).__name__}: {error}"
        self.add(
            "failed",
            what=what,
            error=nameless(text.splitlines()[0][:500]),
            traceback=[nameless(line) for line in lines[-LINES:]],
        )
        traceback.print_exception(error)


def nameless(line: str) -> str:
    """Leave out where this machine has its files."""
    for folder, name in ((_bare.ROOT, "."), (Path(sys.prefix), "ENV"), (Path.home(), "HOME")):
        if len(str(folder)) > 1:
            line = line.replace(str(folder), name)
    return re.sub(r'File "/[^"]*/((?:[^"/]+/){0,2}[^"/]+)"', r'File "\1"', line)


def finite(value: object) -> object:
    """Write numbers that JSON has not as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value


def free() -> None:
    """Give memory back after a case."""
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def usable(device: str) -> bool:
    """Whether the device still computes."""
    if device == "cpu":
        return True
    try:
        torch.cuda.synchronize()
        return float(torch.ones(8, device=device).sum()) == 8
    except Exception:  # whatever it is, it is not usable
        return False


def function_of(part: str) -> Callable[[Report, str], None]:
    """The function of a part."""
    module, _, name = PARTS[part].partition(":")
    found: Callable[[Report, str], None] = getattr(import_module(module), name)
    return found


def main() -> None:
    """Do the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--cases", required=True, help="separated by |")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    device = "cpu" if given.quick else "cuda"
    until = monotonic() + given.seconds
    report = Report(given.part, device, given.quick, until, given.into)
    if given.seconds > 5:  # shows where a process hung that is about to be killed
        faulthandler.dump_traceback_later(given.seconds, file=sys.stderr)
    torch.manual_seed(0)
    do = None
    for case in given.cases.split("|"):
        if report.left < 0:
            report.add("left out", case=case, why="the time of this part is over")
            continue
        report.add("begun", case=case)
        with report.trying(case):
            do = do or function_of(given.part)
            do(report, case)
        free()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
