# environment: vllm
"""Output tokens a second of a stock vLLM on a CPU while requests wait: its caches and ours.

`vllm_throughput` asks so few requests that the smallest caches hold all of them at once. Enough
come here that every cache is full and has some waiting, which is when a smaller cache serves more:
SmolLM2-135M, prompts of 1,024 to 4,096 tokens, answers of 1,024 to 1,280, the memory of four of
them uncompressed. Engines run one at a time and eagerly; a ratio is of tokens a second over the
whole run, its emptying end included. Rows have the rate while requests waited as well. Which
policies count as lossless, and which as losing 5 %, is what `vllm_quality` measured.
"""

from functools import partial
from pathlib import Path

from _vllm_engine import ran
from _vllm_load import Load
from _vllm_process import Row, Rows, apart
from _vllm_served import HELD, best, headline, losing, ratio, room_of
from _vllm_ways import BF16, FP8, arguments, figure, with_basis

QUEUE = Load("queue", 40, (1024, 4096), (1024, 1280))
QUICK = Load("quick", 8, (128, 256), (24, 32))
POLICIES = ("kv-compress:rate=4+k8v4", "kv-compress:rate=8+k8v4", "kv-compress:rate=2+k8v4")


def measure(policies: list[str], basis: Path | None, *, quick: bool) -> Rows:
    """Let all serve the same requests, one after the other."""
    ways = (*with_basis(policies, basis), BF16, FP8)
    load = QUICK if quick else QUEUE
    room = room_of(load, compiled=False)
    rows = Rows("vllm_queue", {"ways": ways, "load": str(load), "held": HELD}, quick=quick)
    about: Row = {"load": load.name, "requests": load.requests, "kv_bytes": room.kv_bytes}
    for way in ways:
        key = {"kind": "served", "way": figure(way), "round": 0, **about}
        rows.measured(key, partial(apart, ran, way, room, load.asks()))
    return rows


def figures(rows: list[Row]) -> dict[str, float]:
    """The best of each group, and every cache over stock bf16."""
    served = [row for row in rows if row["kind"] == "served"]
    load = str(served[0]["load"])
    each = {
        f"{row['way']}_vs_bf16": ratio(rows, load, str(row["way"]), BF16)
        for row in served
        if row["way"] != BF16
    }
    return headline(rows, load) | each


def main() -> None:
    """Run everything and write the result."""
    given = arguments(__doc__, POLICIES).parse_args()
    rows = measure(given.policies, given.basis, quick=given.quick)
    groups = {} if given.quick else losing()  # what was measured is kept if this is missing
    rows.rows += best(rows.rows, QUEUE.name, groups)
    rows.finish(figures(rows.rows))


if __name__ == "__main__":
    main()
