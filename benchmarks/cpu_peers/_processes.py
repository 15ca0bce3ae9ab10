"""Processes of engines, each in its environment."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from _plan import ENGINES, Size, Way, spare
from _protocol import Room

HERE: Final = Path(__file__).parent
THREADS: Final = 2
VARIABLES: Final = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in the process that asks
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


class Process:
    """The process of an engine, which answers a question at a time."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], name: str) -> None:
        """Start it and read what is installed there."""
        self._name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )
        self.versions: dict[str, str] = self._answer()

    def ask(self, do: str, way: str, **given: object) -> Any:
        """Ask a question and wait for its answer.

        Raises:
            RuntimeError: the process ended.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which the missing answer tells
            self._process.stdin.write(f"{json.dumps({'do': do, 'way': way, **given})}\n")
            self._process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        """End it, as there are no more questions."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # of a question that it did not read
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"the process of {self._name} ended with {code}; it says why above")
        return json.loads(line)


class Processes:
    """Processes of engines, each started at its first question."""

    def __init__(self, environments: Path, model: Path, size: Size, made: Path) -> None:
        """Take the folder of environments, the GGUF file, and a folder for files made from it."""
        longest = max(each.tokens for each in size.cells) + spare(size)
        room = Room(THREADS, longest, max(each.batch for each in size.cells))
        self._given = (str(model), json.dumps(asdict(room)))
        self._environments, self._made = environments, made
        self._running: dict[str, Process] = {}
        self.versions: dict[str, dict[str, str]] = {}

    def ask(self, do: str, way: Way, **given: object) -> Any:
        """Ask the engine of a way."""
        if way.process not in self._running:
            self._running[way.process] = found = self._started(way)
            self.versions[way.engine] = found.versions
        return self._running[way.process].ask(do, way.spec, **given)

    def end(self) -> None:
        """End all."""
        for process in self._running.values():
            process.end()
        self._running.clear()

    def _started(self, way: Way) -> Process:
        session, script = ENGINES[way.engine]
        python = (
            sys.executable
            if session is None
            else str(self._environments / session / "bin" / "python")
        )
        variables = {**VARIABLES, "OMP_NUM_THREADS": str(THREADS), "PEERS_FOLDER": str(self._made)}
        return Process((python, str(HERE / script), *self._given), variables, way.process)


@contextmanager
def processes(environments: Path, model: Path, size: Size) -> Iterator[Processes]:
    """Processes that end with the block."""
    with TemporaryDirectory() as made:
        found = Processes(environments, model, size, Path(made))
        try:
            yield found
        finally:
            found.end()
