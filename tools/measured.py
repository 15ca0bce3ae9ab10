"""The figures that `kv-serve recommend` goes by, from benchmark results.

`python -m tools.measured` writes them; a test fails if they are out of date. Every result is used
that compares nats per token, window by window, with the full cache of SmolLM2-135M-Instruct.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Final

import msgspec

from kv_eval.evaluate.intervals import of_change
from kv_policy import parse
from kv_transformers.from_text import FULL
from kv_transformers.measured import FILE, Figure, Found, Measured
from tools.tables.markdown import Row
from tools.tables.page import RESULTS, ROOT, result

PATH: Final = ROOT / "packages" / "kv-transformers" / "src" / "kv_transformers" / FILE
MODEL: Final = "SmolLM2-135M-Instruct"
PEERS: Final = "peers"
OWN: Final = ("kld",)  # with a row of nats for each policy and for the full cache
NUMBERS: Final = ("needle", "multikey")
DIGITS: Final = 6


def written() -> bytes:
    """Return the content of the file."""
    names = [PEERS, *(name for name in OWN if (RESULTS / f"{name}.json").exists())]
    about = next(row for row in result(PEERS)["rows"] if row["kind"] == "about")
    figures = [
        figure
        for name in names
        for figure in (of_peers() if name == PEERS else of_windows(name, result(name)["rows"]))
    ]
    data = Measured(
        model=MODEL,
        fingerprint=about["model"],
        commits={name: result(name)["commit"] for name in names},
        figures=tuple(figures),
    )
    return msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n"


def of_peers() -> Iterator[Figure]:
    """Read our configurations of the comparison with other projects."""
    length, samples = asked()
    ours = [
        row
        for row in result(PEERS)["rows"]
        if row["kind"] == "way" and row["environment"] == "ours"
    ]
    cells = {(row["way"], row["task"], row["setting"]): row for row in ours}
    for way in dict.fromkeys(row["way"] for row in ours):
        nats = cells.get((way, "nll", "agnostic"))
        if way == FULL or nats is None or parse(way).fitted_to is not None:
            continue
        numbers = [
            of_numbers(cells[way, task, setting], cells[FULL, task, setting], samples)
            for task in NUMBERS
            for setting in ("aware", "agnostic")
            if (way, task, setting) in cells
        ]
        changes = nats["scores"]  # over the full cache's
        yield figure(PEERS, way, length, changes, [0.0] * len(changes), numbers)


def of_windows(name: str, rows: Sequence[Row]) -> Iterator[Figure]:
    """Read a result that has the nats of each window."""
    (full,) = (row for row in rows if row["kind"] == "policy" and row["policy"] == FULL)
    for row in rows:
        if row["kind"] != "policy" or row["policy"] == FULL:
            continue
        if parse(row["policy"]).fitted_to is None:
            yield figure(name, row["policy"], row["length"], row["nats"], full["nats"])


def figure(
    name: str,
    policy: str,
    length: int,
    nats: Sequence[float],
    full: Sequence[float],
    numbers: Iterable[Found] = (),
) -> Figure:
    """Summarize the nats of a policy's windows beside those of the full cache.

    Raises:
        ValueError: there are fewer than two windows.
    """
    interval = of_change(nats, full)
    if interval is None:
        raise ValueError(f"{name} has {len(nats)} window of {policy}; an interval needs two")
    return Figure(
        policy=str(parse(policy)),
        result=name,
        length=length,
        windows=len(nats),
        loss=round(fmean(nats) - fmean(full), DIGITS),
        interval=(round(interval[0], DIGITS), round(interval[1], DIGITS)),
        numbers=tuple(numbers),
    )


def of_numbers(row: Row, full: Row, samples: int) -> Found:
    """Count the numbers that were found.

    Raises:
        ValueError: a row has no answers one by one, and the full cache did not find all numbers.
    """
    mine, before = (_answers(each, samples) for each in (row, full))
    if "scores" not in row and not all(before):
        raise ValueError(f"{row['way']} on {row['task']} has no answers that can be paired")
    change = of_change(mine, before)
    assert change is not None
    return Found(
        task=row["task"],
        setting=row["setting"],
        samples=len(mine),
        found=round(sum(mine)),
        full_found=round(sum(before)),
        change=(round(change[0], DIGITS), round(change[1], DIGITS)),
    )


def _answers(row: Row, samples: int) -> list[float]:
    """Return whether each number was found, in any order where only their share is known."""
    right = round(samples * row["score"])
    given: list[float] = row.get("scores") or [1.0] * right + [0.0] * (samples - right)
    return given


@cache
def asked() -> tuple[int, int]:
    """Return the tokens of a prompt and the samples of a cell, in the comparison with others."""
    folder = str(ROOT / "benchmarks" / PEERS)
    if folder not in sys.path:
        sys.path.append(folder)
    size = import_module("_samples").Size()
    return size.length, size.samples


if __name__ == "__main__":
    from kv_policy.files import write_whole

    content = written()
    if not PATH.exists() or PATH.read_bytes() != content:
        write_whole(PATH, content)
        print(f"wrote {PATH.relative_to(Path.cwd())}", file=sys.stderr)
