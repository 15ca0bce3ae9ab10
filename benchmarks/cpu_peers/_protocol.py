"""What the process of an engine is asked, and what it answers: a line of JSON each.

Nothing but the standard library is needed, so this works in any engine's environment.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TextIO


@dataclass(frozen=True, slots=True)
class Opened:
    """A prompt that was read, whose sequences are ready to decode."""

    first: float  # seconds to the first token of the prompt, which is alone
    kv_bytes: int  # of the keys and values of all sequences


@dataclass(frozen=True, slots=True)
class Room:
    """What an engine must have room for."""

    threads: int
    longest: int  # tokens of a sequence, its answer included
    together: int  # sequences that decode at once


class Engine(Protocol):
    """An engine that decodes the same text under several ways to hold a cache, one of them open."""

    def open(self, way: str, prompt: Sequence[int], batch: int, room: int) -> Opened:
        """Read a prompt for `batch` sequences that hold memory of their own, `room` tokens each."""

    def steps(self, way: str, count: int) -> list[float]:
        """Decode a token of each sequence `count` times; seconds of each time."""

    def close(self, way: str) -> None:
        """End the sequences and free their memory."""

    def nats(self, way: str, prompt: Sequence[int], target: Sequence[int]) -> float | None:
        """Mean nats per token of a target after a prompt; None where the engine cannot say."""


def answers(engine: Engine, questions: TextIO, out: TextIO) -> None:
    """Answer until there are no more questions."""
    for line in questions:
        given: dict[str, Any] = json.loads(line)
        found: Any = getattr(engine, given.pop("do"))(**given)
        put(out, asdict(found) if isinstance(found, Opened) else found)


def put(out: TextIO, answer: object) -> None:
    """Print an answer, so that it is read at once."""
    print(json.dumps(answer, allow_nan=False), file=out, flush=True)


def own_output() -> TextIO:
    """Keep standard output for answers; what libraries print there goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def room_given() -> tuple[str, Room]:
    """The model's path and the room, of the command line."""
    model, room = sys.argv[1:]
    return model, Room(**json.loads(room))


def versions(*names: str) -> dict[str, str]:
    """What is installed."""
    from importlib.metadata import version

    return {name: version(name) for name in names}
