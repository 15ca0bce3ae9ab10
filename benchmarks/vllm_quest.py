# environment: vllm
"""Decode steps of a stock vLLM on a CPU in which each layer reads some of its pages.

SmolLM2-135M, requests of one long prompt each, two threads, eager engines. Each way has an engine
in a process of its own; all take turns of a few steps, every second round backwards, and the first
steps of a turn do not count. Ratios are of the medians of all steps: the time under `k8v4` over
that of the same format when a share of the pages is read, ranked by bounds of keys or by codes of
them, so more than 1 is faster. `attention` is the share of a step in which layers attend, select
pages and store, with the metadata of the step.
"""

import argparse
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Final

import _result
from _arguments import count
from _vllm_engine import Room
from _vllm_load import raw_token_bytes, text_ids
from _vllm_process import CONSOLE, Row, alternating
from _vllm_turns import Engine
from _vllm_ways import BF16, canonical

TURN: Final = 10  # steps of a turn
UNSEEN: Final = 2  # of these before the first that counts
WATCHED: Final = 20  # steps whose shares are measured
BASE: Final = "k8v4"
WAYS: Final = {
    BF16: BF16,
    BASE: BASE,
    "quest_25": canonical("k8v4+quest:budget=25%"),
    "quest_12": canonical("k8v4+quest:budget=12.5%"),
    "codes_12": canonical("k8v4+quest:budget=12.5%,by=codes"),
    "codes_6": canonical("k8v4+quest:budget=6.25%,by=codes"),
}


@dataclass(frozen=True, slots=True)
class Size:
    """Requests that decode together, and the tokens of each prompt."""

    batch: int
    tokens: int

    @property
    def name(self) -> str:
        """Give a name for figures, such as `4x7680`."""
        return f"{self.batch}x{self.tokens}"


SIZES: Final = (Size(1, 7680), Size(4, 7680))
QUICK: Final = (Size(2, 256),)


def prompts(size: Size) -> list[list[int]]:
    """Read prompts that begin at different places of a text."""
    ids = text_ids()
    begins = (997 * i % (len(ids) - size.tokens) for i in range(size.batch))
    return [ids[begin : begin + size.tokens] for begin in begins]


def measure(size: Size, rounds: int) -> list[Row]:
    """Let the engines of all ways take turns; a row of each."""
    longest = size.tokens + rounds * TURN + WATCHED + 8 + size.batch
    kv_bytes = (size.batch * longest + 1024) * raw_token_bytes()
    # A step reads a whole prompt, and decodes for the requests before it.
    room = Room(kv_bytes, longest, longest + 64, size.batch)
    rows: list[Row] = []
    with ExitStack() as held:
        engines = {way: Engine.start(way, room, 2, held) for way in WAYS.values()}
        for way, engine in engines.items():
            engine.open(prompts(size))
            CONSOLE.print(f"{size.name} {way}: prompts are read")
        took: dict[str, list[list[float]]] = {way: [] for way in engines}
        for _, way in alternating(tuple(engines), rounds):
            took[way].append(engines[way].steps(TURN)[UNSEEN:])
        for way, engine in engines.items():
            whole, ours, _ = engine.shares(WATCHED)
            seconds = [*chain(*took[way])]
            rows.append(
                {
                    "way": way,
                    "batch": size.batch,
                    "tokens": size.tokens,
                    "median": median(seconds),
                    "seconds": seconds,
                    "attention": ours / whole,
                }
            )
            CONSOLE.print(f"{size.name} {way}: {1000 * median(seconds):.2f} ms")
    return rows


def figures(size: Size, rows: list[Row]) -> dict[str, float]:
    """Give the time of a step of `k8v4` over that of the others."""
    medians = {row["way"]: float(str(row["median"])) for row in rows}
    others = {name: way for name, way in WAYS.items() if way != BASE}
    return {f"k8v4_over_{x}_{size.name}": medians[BASE] / medians[y] for x, y in others.items()}


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    parser.add_argument("--rounds", type=count, default=8, help="turns of every engine")
    given = parser.parse_args()
    rows: list[Row] = []
    summary: dict[str, float] = {}
    for size in QUICK if given.quick else SIZES:
        found = measure(size, 2 if given.quick else given.rounds)
        rows += found
        summary |= figures(size, found)
    for name, value in summary.items():
        print(f"{name:40} {value:.4f}")
    _result.write("vllm_quest", summary, rows, quick=given.quick)


if __name__ == "__main__":
    main()
