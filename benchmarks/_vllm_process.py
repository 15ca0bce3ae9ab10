"""Work that needs an engine, in a process of its own, and the rows that have been measured."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from time import monotonic
from typing import Final, ParamSpec, TypeVar
from unittest.mock import patch

import _result
from rich.console import Console

from kv_eval.evaluate.records import Records

P = ParamSpec("P")
T = TypeVar("T")
CONSOLE: Final = Console(stderr=True)
QUIET: Final = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
STEPPED: Final = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the engine is in the process that asks
THREADS: Final = {"OMP_NUM_THREADS": "2"}  # of all engines that are timed, whatever is set outside

Row = dict[str, object]


def apart(work: Callable[P, T], *arguments: P.args, environment: Mapping[str, str] = STEPPED) -> T:
    """Call a function in a fresh process, which leaves nothing to the next one.

    Raises:
        concurrent.futures.process.BrokenProcessPool: the process died.
    """
    with (
        patch.dict(os.environ, QUIET | dict(environment)),
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
    ):
        return pool.submit(work, *arguments).result()


def asked(
    work: Callable[..., None],
    *arguments: object,
    held: ExitStack,
    environment: Mapping[str, str] = STEPPED,
) -> Connection:
    """Call work(*arguments, pipe) in a fresh process and wait for its first message.

    It answers messages until an empty one, which `held` sends when it ends.
    """
    context = get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=work, args=(*arguments, theirs), daemon=True)
    with patch.dict(os.environ, QUIET | dict(environment)):
        process.start()
    theirs.close()
    held.callback(process.join)
    held.callback(mine.send, ())
    mine.recv()
    return mine


class Rows:
    """What has been measured, on disk row by row, so that a later run goes on from here.

    The file is `<name>.partial` beside the results. Its first line says what was asked and of which
    commit; a file that was asked something else is set aside. A quick run keeps no file. After
    `minutes` no row is begun.
    """

    def __init__(
        self, name: str, asked: Mapping[str, object], *, quick: bool, minutes: float | None = None
    ) -> None:
        """Take over the rows of an earlier run that asked for the same."""
        self.name, self.quick = name, quick
        self.until = None if minutes is None else monotonic() + 60 * minutes
        self.path = _result.RESULTS / f"{name}.partial"
        self.rows: list[Row] = []
        if quick:
            return
        head = {"commit": _result.commit(), **asked}
        if not self.path.exists():
            self.records = Records.start(self.path, head)
            return
        self.records, wrong = Records.resume(self.path, head)
        self.rows = [json.loads(line) for line in self.records.lines]
        CONSOLE.print(f"{wrong} going on from {self.path}, which has {len(self.rows)} rows".strip())

    def measured(self, key: Row, measure: Callable[[], Row]) -> Row:
        """Give the row that begins with these fields; measure it if it is not there yet.

        Raises:
            SystemExit: the time is over; what there is, is kept.
        """
        for row in self.rows:
            if row.items() >= key.items():
                return row
        if self.until is not None and monotonic() > self.until:
            CONSOLE.print(f"the time is over; {self.path} has {len(self.rows)} rows to go on from")
            raise SystemExit
        CONSOLE.print(" ".join(f"{name}={value}" for name, value in key.items()))
        row = {**key, **measure()}
        self.rows.append(row)
        CONSOLE.print(f"  {row}")
        if not self.quick:
            self.records.append([json.dumps(row, allow_nan=False).encode()])
        return row

    def finish(self, summary: Mapping[str, float]) -> None:
        """Write the result, and let go of the file."""
        for name, value in summary.items():
            print(f"{name:44} {value:.4f}")
        if _result.write(self.name, summary, self.rows, quick=self.quick):
            self.records.remove()


def alternating(names: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """All names in each round, every second one backwards, so that a drift hits all alike."""
    for i in range(rounds):
        yield from ((i, name) for name in (names if i % 2 == 0 else names[::-1]))
