"""The parts of `gpu_first`: each case in a process that may fail, hang or die without the others.

Seconds that a part does not need go to those after it. Rows are collected while processes write
them, and a process that died is started again behind the case that it died in.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep
from typing import Final

import _bare

Row = dict[str, object]
GRACE: Final = 8.0  # seconds after a part's time, before its processes are killed
TAIL: Final = 30  # lines of what a dead process said that are kept


@dataclass(frozen=True)
class Part:
    """Something that is measured or checked.

    Attributes:
        name: of the part, as in `_gpu_child.PARTS`.
        seconds: it should take on a GPU; what all take is scaled to the time there is.
        cases: their names.
        together: how many processes do cases at once.
        alone: every case has a process of its own.
        needs: modules that have to be installed.
    """

    name: str
    seconds: float
    cases: tuple[str, ...]
    together: int = 1
    alone: bool = False
    needs: tuple[str, ...] = ()

    def groups(self) -> list[tuple[str, ...]]:
        """The cases of each process."""
        if self.alone:
            return [(case,) for case in self.cases]
        groups = [self.cases[i :: self.together] for i in range(self.together)]
        return [group for group in groups if group]


@dataclass
class Child:
    """A process, and the cases that it was given."""

    part: str
    cases: tuple[str, ...]
    process: subprocess.Popen[bytes]
    rows: Path
    log: Path
    until: float  # by `monotonic`
    read: int = 0  # bytes of its rows
    begun: int = 0  # cases

    def news(self) -> list[Row]:
        """The whole rows that came since the last call."""
        if not self.rows.exists():
            return []
        with self.rows.open("rb") as file:
            file.seek(self.read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self.read += len(whole)
        rows: list[Row] = [json.loads(line) for line in whole.splitlines()]
        self.begun += sum(row["kind"] in ("begun", "left out") for row in rows)
        return rows

    def end(self) -> None:
        """Kill it, and what it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def tail(self) -> list[str]:
        """The last lines that it said."""
        from _gpu_child import nameless

        lines = self.log.read_text(errors="replace").splitlines()
        return [nameless(line) for line in lines[-TAIL:]]


@dataclass
class Runner:
    """Runs parts one after the other, and keeps all rows.

    `changed` is called after each part.
    """

    folder: Path  # for logs, and rows as they come
    until: float  # by `monotonic`
    quick: bool
    changed: Callable[[list[Row]], None]
    variables: Mapping[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    number: int = 0
    script: Path = Path(__file__).parent / "_gpu_child.py"

    def run(self, parts: Sequence[Part]) -> None:
        """Run them all; `changed` has the last word even if this is interrupted."""
        for i, part in enumerate(parts):
            rest = sum(each.seconds for each in parts[i:])
            seconds = max(self.until - monotonic() - GRACE, 0) * part.seconds / rest
            print(f"\n== {part.name}: {len(part.cases)} cases, {seconds:.0f} s", flush=True)
            began, before = monotonic(), len(self.rows)
            try:
                self._part(part, seconds)
            except Exception as error:  # of this file: the other parts go on
                self._add({"kind": "failed", "part": part.name, "error": repr(error)})
            took = monotonic() - began
            found = self.rows[before:]
            failed = sum(row["kind"] in ("failed", "died") for row in found)
            self._add({"kind": "part", "part": part.name, "seconds": took, "failed": failed})
            self.changed(self.rows)

    def _part(self, part: Part, seconds: float) -> None:
        absent = [name for name in part.needs if find_spec(name) is None]
        if absent:
            why = f"{', '.join(absent)} not installed"
            self._add({"kind": "left out", "part": part.name, "case": "all", "why": why})
            return
        until = monotonic() + seconds
        waiting, running = part.groups(), list[Child]()
        try:
            while waiting or running:
                while waiting and len(running) < part.together:
                    group, share = waiting.pop(0), 1 + (len(waiting) if part.alone else 0)
                    left = until - monotonic()
                    if left <= 0:
                        self._left_out(part, group, "the time of this part is over")
                        continue
                    running.append(self._start(part, group, left / share))
                sleep(0.05)
                for child in list(running):
                    over = monotonic() > child.until + GRACE
                    if child.process.poll() is None and not over:
                        self._take(child)
                        continue
                    running.remove(child)
                    waiting += self._ended(part, child, over=child.process.poll() is None)
        finally:
            for child in running:
                child.end()

    def _start(self, part: Part, cases: tuple[str, ...], seconds: float) -> Child:
        self.number += 1
        stem = f"{self.number:03d}-{part.name}"
        rows, log = self.folder / f"{stem}.jsonl", self.folder / f"{stem}.log"
        bare = ["-S"] if sys.flags.no_site else []
        command = [sys.executable, *bare, str(self.script), part.name, "--cases", "|".join(cases)]
        command += ["--seconds", f"{seconds:.1f}", "--into", str(rows)]
        command += ["--quick"] if self.quick else []
        environment = {**os.environ, **self.variables}
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
                cwd=_bare.ROOT,
            )
        return Child(part.name, cases, process, rows, log, monotonic() + seconds)

    def _take(self, child: Child) -> None:
        for row in child.news():
            self._add(row)

    def _ended(self, part: Part, child: Child, *, over: bool) -> list[tuple[str, ...]]:
        """Collect the last rows; return the cases that are to be done in another process."""
        child.end()  # and what it may have left behind
        self._take(child)
        code = child.process.returncode
        if code == 0:
            return []
        at = child.begun - 1
        case = child.cases[at] if at >= 0 else "start"
        why = "killed, as its time was over" if over else f"exit code {code}"
        died = {"kind": "died", "part": part.name, "case": case, "error": why}
        self._add(died | {"traceback": child.tail()})
        rest = child.cases[at + 1 :]
        if over or at < 0:
            self._left_out(part, rest, "the time of this part is over" if over else why)
            return []
        return [rest] if rest else []

    def _left_out(self, part: Part, cases: Sequence[str], why: str) -> None:
        for case in cases:
            self._add({"kind": "left out", "part": part.name, "case": case, "why": why})

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        if row["kind"] == "begun":
            return
        hidden = ("kind", "part", "traceback", "table")
        said = " ".join(f"{k}={shown(v)}" for k, v in row.items() if k not in hidden)
        print(f"  {row['kind']}: {said}"[:240], flush=True)


def shown(value: object) -> str:
    """A value of a row, shortly."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def fresh(folder: Path) -> Path:
    """Empty a folder of earlier logs."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
