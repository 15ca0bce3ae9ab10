"""What the script of an environment is asked, and the rows that it prints: plain JSON.

Nothing but the standard library is needed, so this works in any peer's environment.
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO

FULL: Final = "full"  # the uncompressed cache of the environment's own program
FIELDS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "way": str,
    "task": str,
    "setting": str,
    "sample": int,
    "kv_bytes": int,  # by the cache's accounting, after the prompt
    "storage_bytes": int,  # of the memory behind its tensors, at the same moment
    "full_bytes": int,  # what an uncompressed cache takes for the prompt
    "tokens": list,  # generated
    "nats": (float, type(None)),  # per token of the target, if there is one
    "seconds": float,
}
FAILED: Final = frozenset({"way", "task", "setting", "sample", "error"})
TIMED: Final = frozenset({"way", "round", "prefill", "decode"})  # seconds, of a pass and of a step
VERSIONS: Final = frozenset({"versions"})

Key = tuple[str, str, str, int]  # way, task, setting, sample
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ask:
    """One sample of `kv_eval.tasks`."""

    prompt: tuple[int, ...]  # is compressed
    question: tuple[int, ...]  # is read after that, and never empty
    target: tuple[int, ...] = ()  # is scored token by token, in place of an answer
    new_tokens: int = 0
    stop: bool = True  # whether an answer ends at the model's end of text


@dataclass(frozen=True, slots=True)
class Cell:
    """The samples of a task in a setting, and the ways to hold a cache that are asked them."""

    task: str
    setting: str
    ways: tuple[str, ...]
    asks: tuple[Ask, ...]

    def key(self, way: str, sample: int) -> Key:
        """Name a row."""
        return way, self.task, self.setting, sample


@dataclass(frozen=True, slots=True)
class Work:
    """Everything that a script is asked."""

    model: str  # folder
    ends: tuple[int, ...]  # tokens before which an answer ends
    cells: tuple[Cell, ...]
    done: frozenset[Key] = field(default_factory=frozenset)
    rounds: int = 0  # of timing the first sample of the first cell, in place of answering

    def open(self) -> Iterator[tuple[Cell, int, Ask, tuple[str, ...]]]:
        """Samples that are still to be asked, and the ways that have not answered them."""
        for cell in self.cells:
            for i, ask in enumerate(cell.asks):
                ways = tuple(way for way in cell.ways if cell.key(way, i) not in self.done)
                if ways:
                    yield cell, i, ask, ways

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self) | {"done": sorted(self.done)}))

    @classmethod
    def read(cls, path: Path) -> "Work":
        """Read what `write` wrote."""
        content = json.loads(path.read_text())
        cells = tuple(
            Cell(
                cell["task"],
                cell["setting"],
                tuple(cell["ways"]),
                tuple(_ask(ask) for ask in cell["asks"]),
            )
            for cell in content["cells"]
        )
        done = frozenset((way, task, setting, i) for way, task, setting, i in content["done"])
        return cls(content["model"], tuple(content["ends"]), cells, done, content["rounds"])


def named(key: Key) -> Row:
    """The fields of a row that name it."""
    return dict(zip(("way", "task", "setting", "sample"), key, strict=True))


def checked(row: Row) -> Row:
    """Give a row back if it has exactly the fields of its kind.

    Raises:
        ValueError: a field is missing, unknown or of another type.
    """
    if row.keys() in (FAILED, TIMED, VERSIONS):
        return row
    if row.keys() != FIELDS.keys():
        raise ValueError(f"fields missing or unknown: {sorted(row.keys() ^ FIELDS.keys())}")
    for name, kind in FIELDS.items():
        if isinstance(row[name], bool) or not isinstance(row[name], kind):
            raise ValueError(f"{name} is {row[name]!r}")
    return row


def rows_out() -> TextIO:
    """Keep standard output for rows; whatever libraries print there goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def put(out: TextIO, row: Row) -> None:
    """Print a row, so that it is read at once."""
    print(json.dumps(checked(row), allow_nan=False), file=out, flush=True)


def versions(names: Collection[str]) -> Row:
    """A row that says what is installed, and by which instructions torch computes."""
    from importlib.metadata import version

    import torch

    found = {name: version(name) for name in sorted(names)}
    return {"versions": found | {"instructions": torch.backends.cpu.get_cpu_capability()}}


def _ask(content: Mapping[str, Any]) -> Ask:
    prompt, question, target = (tuple(content[n]) for n in ("prompt", "question", "target"))
    return Ask(prompt, question, target, content["new_tokens"], content["stop"])
