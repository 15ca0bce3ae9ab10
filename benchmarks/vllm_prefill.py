# environment: vllm
"""Seconds until the first token in a stock vLLM, under policies that score a prompt's tokens.

Each way has an engine of its own in a process of its own. All are asked the same prompt of 2,000
tokens in turn, one at a time, every second round backwards; seconds are from the request to its
first token, of one thread. Chunks are larger than the prompt, so each prompt is one step.
`ratio_gate` and those of others are medians of the ratios within a round over `k8v4`, which stores
the same format and scores nothing; `stock_ratio_k8v4` is `k8v4` over vLLM's own cache.
"""

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median, quantiles
from typing import Final

import _result
from _arguments import count
from _vllm_engine import Ask, Room, serve, started
from _vllm_load import raw_token_bytes, text_ids
from _vllm_process import CONSOLE, STEPPED, alternating, asked
from _vllm_ways import BF16

LENGTH: Final = 2000
PLAIN: Final = "k8v4"
WAYS: Final = {
    "stock": BF16,
    PLAIN: PLAIN,
    "kv_compress": "kv-compress:budget=520+k8v4",
    "snapkv": "snapkv:budget=520+k8v4",
    "gate": "gate:file=smollm2-135m,budget=520+k8v4",
}
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
UNSEEN: Final = 2  # rounds before the first that counts


def answer(way: str, room: Room, dtype: str, pipe: Connection) -> None:
    """Answer prompts with the seconds to their first token, until there is none."""
    with started(way, room, dtype) as (engine, counting):
        pipe.send(None)
        while prompt := pipe.recv():
            began = time.perf_counter()
            serve(engine, counting, [Ask(prompt, 1)])
            pipe.send(time.perf_counter() - began)


@dataclass(frozen=True)
class Engine:
    """An engine in a process of its own."""

    pipe: Connection

    @classmethod
    def start(cls, way: str, room: Room, dtype: str, held: ExitStack) -> "Engine":
        """Start it and wait until it can be asked; it ends with `held`."""
        return cls(asked(answer, way, room, dtype, held=held, environment=STEPPED | ONE_THREAD))

    def seconds(self, prompt: Sequence[int]) -> float:
        """Until the first token."""
        self.pipe.send(tuple(prompt))
        found: float = self.pipe.recv()
        return found


def measure(length: int, rounds: int, dtype: str) -> dict[str, list[float]]:
    """Ask all engines in turn."""
    room = Room(8 * length * raw_token_bytes(), length + 16, length + 16, 4)
    ids = text_ids()
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    with ExitStack() as held:
        engines = {n: Engine.start(way, room, dtype, held) for n, way in WAYS.items()}
        for i, name in alternating(tuple(WAYS), rounds + UNSEEN):
            begin = 997 * i % (len(ids) - length)
            took = engines[name].seconds(ids[begin : begin + length])
            CONSOLE.print(f"round {i} {name} {took:.3f} s")
            if i >= UNSEEN:
                found[name].append(took)
    return found


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    parser.add_argument("--rounds", type=count, default=11, help="turns of every engine")
    parser.add_argument("--dtype", default="auto", help="of the model, such as float32")
    given = parser.parse_args()
    length, rounds = (300, 2) if given.quick else (LENGTH, given.rounds)
    seconds = measure(length, rounds, given.dtype)
    rows, summary = [], {}
    for name, way in WAYS.items():
        over = "stock" if name == PLAIN else PLAIN
        ratios = [a / b for a, b in zip(seconds[name], seconds[over], strict=True)]
        quartiles = quantiles(ratios, n=4, method="inclusive")
        if name != "stock":
            summary[f"{'stock_' if over == 'stock' else ''}ratio_{name}"] = median(ratios)
        rows.append(
            {
                "kind": "prefill",
                "way": way,
                "dtype": given.dtype,
                "tokens": length,
                "seconds": seconds[name],
                "median": median(seconds[name]),
                "over": over,
                "ratio": quartiles,
            }
        )
    for name, value in summary.items():
        print(f"{name:30} {value:.4f}")
    _result.write("vllm_prefill", summary, rows, quick=given.quick)


if __name__ == "__main__":
    main()
