# environment: vllm
"""What vLLM itself says that it can hold, and how it runs work that does not fit.

SmolLM2-135M. Rows of kind `size` are vLLM's own "KV cache size" and maximum concurrency, with the
same bytes for keys and values. Rows of kind `load` are requests that all come at once, to engines
of the same bytes: the most that ran at a time, preemptions and engine steps, from vLLM's own
statistics. Counts are exact; the seconds beside them are not a measurement of speed.
"""

from functools import partial
from pathlib import Path

from _vllm_engine import Room, capacity, ran
from _vllm_load import Load, raw_token_bytes
from _vllm_process import STEPPED, THREADS, Row, Rows, apart
from _vllm_ways import BF16, FP8, arguments, figure, with_basis

POLICIES = (
    "k8v4",
    "k4v2",
    "leankv",
    "kv-compress:rate=2",
    "kv-compress:rate=4",
    "kv-compress:rate=8",
    "kv-compress:rate=2+k8v4",
    "kv-compress:rate=4+k8v4",
    "kv-compress:rate=8+k8v4",
    "{zack}",
    "kv-compress:rate=4+{zack}+k8v4",
)
SIZE = Room(kv_bytes=1 << 30)
# Tokens of stock that the memory holds, tokens of a step, and the requests.
LOADS = (
    (8192, 2048, Load("prompts", 24, (1024, 1024), (128, 128))),
    (2560, 256, Load("answers", 12, (200, 200), (400, 400))),
)
QUICK = ((1024, 256, Load("quick", 4, (400, 400), (16, 16))),)


def measure(
    policies: list[str],
    basis: Path | None,
    *,
    quick: bool,
    minutes: float | None = None,
    size: Room = SIZE,
) -> Rows:
    """Ask vLLM for its capacity under every policy, and let it run the loads."""
    ways = (BF16, *(() if quick else (FP8,)), *with_basis(policies, basis))
    loads = QUICK if quick else LOADS
    asked = {"ways": ways, "loads": str(loads), "size": str(size)}
    rows = Rows("vllm_capacity", asked, quick=quick, minutes=minutes)
    for way in ways:
        key: Row = {"kind": "size", "way": figure(way), "kv_bytes": size.kv_bytes}
        rows.measured(key, partial(apart, capacity, way, size))
    for held, chunk, load in loads:
        room = Room(held * raw_token_bytes(), load.longest, chunk)
        for way in ways:
            key = {
                "kind": "load",
                "load": load.name,
                "way": figure(way),
                "requests": load.requests,
                "prompt": load.prompt[1],
                "answer": load.answer[1],
                "kv_bytes": room.kv_bytes,
                "chunk": chunk,
            }
            timed = partial(apart, ran, way, room, load.asks(), environment=STEPPED | THREADS)
            rows.measured(key, timed)
    return rows


def figures(rows: list[Row]) -> dict[str, float]:
    """Tokens over those of stock."""
    tokens = {str(r["way"]): float(str(r["tokens"])) for r in rows if r["kind"] == "size"}
    return {f"tokens_{way}": each / tokens[BF16] for way, each in tokens.items() if way != BF16}


def main() -> None:
    """Run everything and write the result."""
    given = arguments(__doc__, POLICIES).parse_args()
    rows = measure(given.policies, given.basis, quick=given.quick, minutes=given.minutes)
    rows.finish(figures(rows.rows))


if __name__ == "__main__":
    main()
