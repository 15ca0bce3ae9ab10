# environment: vllm
"""Decode steps and prompts of a stock vLLM on a CPU, and what policies add to both.

SmolLM2-135M, prompts of 2,000 tokens, two threads. Each way has an engine in a process of its own;
all take turns of a few steps, every second round backwards, and the first steps of a turn do not
count. Ratios are of the medians of all steps, or of all prompts, of a way: over stock bf16, and for
steps of `leankv` over `k4v2`, which stores all tokens in the smaller of its formats. Prompts are
alone in their step. `own_share` is what `k8v4` does beside native attention, which stores the new
token as well: Python, metadata and calls, as a share of a step. Names without `compiled` are of
eager engines. On a processor with AMX the result is `vllm_steps_amx`.
"""

import argparse
from contextlib import ExitStack
from itertools import chain
from statistics import median
from typing import Final

import _result
from _arguments import count
from _vllm_engine import Room
from _vllm_load import raw_token_bytes, text_ids
from _vllm_process import CONSOLE, Row, alternating
from _vllm_turns import Engine
from _vllm_ways import BF16

from kv_cpu import runnable

LENGTH: Final = 2000
TURN: Final = 10  # steps of a turn
UNSEEN: Final = 2  # of these, and prompts of each way, before the first that counts
WATCHED: Final = 40  # steps whose shares are measured
PLAIN, LEAN, BASE, EVICTS = "k8v4", "leankv", "k4v2", "kv-compress:rate=4+k8v4"
NAMES: Final = {BF16: BF16, PLAIN: PLAIN, BASE: BASE, LEAN: LEAN, EVICTS: "kv_compress"}
COMPILED: Final = (BF16, PLAIN, EVICTS)


def measure(
    ways: tuple[str, ...], batches: list[int], length: int, rounds: int, *, compiled: bool
) -> list[Row]:
    """Let the engines of all ways take turns; a row of each way, of prompts and of each batch."""
    ids, steps = text_ids(), rounds * TURN + WATCHED + 4 * UNSEEN + max(batches)
    longest = length + steps
    kv_bytes = (max(batches) + 1) * longest * raw_token_bytes()
    room = Room(kv_bytes, longest, length + 48, max(batches), compiled)
    rows: list[Row] = []

    def prompt(i: int) -> list[int]:
        begin = 997 * i % (len(ids) - length)
        return ids[begin : begin + length]

    def note(way: str, kind: str, batch: int, seconds: list[float], **more: object) -> None:
        mode = "compiled" if compiled else "eager"
        head = {"kind": kind, "mode": mode, "way": way, "batch": batch, "tokens": length}
        rows.append({**head, "median": median(seconds), "seconds": seconds, **more})
        CONSOLE.print(f"{kind} {mode} {way} {batch}x{length}: {1000 * median(seconds):.2f} ms")

    with ExitStack() as held:
        engines = {way: Engine.start(way, room, 2, held) for way in ways}
        read: dict[str, list[float]] = {way: [] for way in ways}
        for i, way in alternating(ways, rounds + UNSEEN):
            read[way].append(engines[way].prompt(prompt(i)))
        for way in ways:
            note(way, "prompt", 1, read[way][UNSEEN:])
        for batch in batches:
            for way in ways:
                engines[way].open([prompt(i) for i in range(batch)])
            took: dict[str, list[list[float]]] = {way: [] for way in ways}
            for _, way in alternating(ways, rounds):
                took[way].append(engines[way].steps(TURN)[UNSEEN:])
            for way in ways:
                whole, ours, kernels = engines[way].shares(WATCHED)
                shares = {"attention": ours / whole}  # with metadata and storing
                if way != BF16:  # whose kernels are not counted
                    shares["own"] = (ours - kernels) / whole
                note(way, "step", batch, [*chain(*took[way])], **shares)
                engines[way].close(batch)
    return rows


def figures(rows: list[Row]) -> dict[str, float]:
    """Ratios of medians, and the shares of a step that are work of `k8v4` beside its kernels."""
    found = {}
    by_key = {(row["kind"], row["mode"], row["way"], row["batch"]): row for row in rows}
    for (kind, mode, way, batch), row in by_key.items():
        if way in (BF16, BASE):
            continue
        of_base = kind == "step" and way == LEAN
        over, beside = (BASE, "k4v2") if of_base else (BF16, "bf16")
        shape = f"_{batch}x2k" if kind == "step" and not (of_base and batch == 1) else ""
        end = shape if mode == "eager" else f"{shape}_{mode}"
        name = f"{NAMES[str(way)]}_{kind}_vs_{beside}{end}"
        found[name] = ratio(row, by_key[kind, mode, over, batch])
        if kind == "step" and way == PLAIN:
            found[f"own_share{end}"] = float(str(row["own"]))
    return found


def ratio(row: Row, over: Row) -> float:
    """Of the medians of two rows."""
    return float(str(row["median"])) / float(str(over["median"]))


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    parser.add_argument("--rounds", type=count, default=10, help="turns of every engine")
    parser.add_argument("--batches", type=count, nargs="+", default=[1, 8], help="requests at once")
    parser.add_argument("--eager", action="store_true", help="no compiled engines")
    given = parser.parse_args()
    length, rounds = (200, 2) if given.quick else (LENGTH, given.rounds)
    batches = [1, 2] if given.quick else given.batches
    rows = measure(tuple(NAMES), batches, length, rounds, compiled=False)
    if not (given.quick or given.eager):
        rows += measure(COMPILED, batches, length, rounds, compiled=True)
    summary = figures(rows)
    for name, value in summary.items():
        print(f"{name:40} {value:.4f}")
    name = "vllm_steps_amx" if "amx" in runnable() else "vllm_steps"
    _result.write(name, summary, rows, quick=given.quick)


if __name__ == "__main__":
    main()
