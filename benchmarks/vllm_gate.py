# environment: vllm
"""The gate inside a stock vLLM: tokens that fit, and output tokens a second while requests wait.

SmolLM2-135M, prompts of 1,000 to 2,800 tokens and answers of 256. The memory is that of 10,240
uncompressed tokens, all requests come at once, and as many run as vLLM admits. Engines run eagerly,
one at a time, each once a round and every second round backwards. Rows of kind `size` are exact:
vLLM's own "KV cache size" over that of its own cache. `served` rows have tokens a second over the
whole run; a figure is the ratio of medians over rounds.
"""

from functools import partial
from typing import Final

from _arguments import count
from _vllm_engine import Room, capacity, ran
from _vllm_load import Load, raw_token_bytes
from _vllm_process import STEPPED, THREADS, Row, Rows, alternating, apart
from _vllm_served import over_bf16, rates
from _vllm_ways import BF16, FP8, arguments, figure

LOAD: Final = Load("long", 24, (1000, 2800), (256, 256))
QUICK: Final = Load("quick", 4, (128, 256), (16, 16))
HELD: Final = 10_240  # uncompressed tokens that the memory holds
GATE: Final = "gate:file=smollm2-135m"
POLICIES: Final = (
    "k8v4",
    "kv-compress:keep=25%+k8v4",
    f"{GATE},keep=25%+k8v4",
    f"{GATE},keep=12.5%,recent=64+k8v4",
)


def measure(policies: list[str], rounds: int, *, quick: bool, minutes: float | None = None) -> Rows:
    """Ask every engine for its capacity, then let all serve the same requests in rounds."""
    ways = (BF16, *(() if quick else (FP8,)), *policies)
    load, held = (QUICK, 1024) if quick else (LOAD, HELD)
    room = Room(held * raw_token_bytes(), load.longest)
    asked = {"ways": ways, "load": str(load), "room": str(room)}
    rows = Rows("vllm_gate", asked, quick=quick, minutes=minutes)
    for way in ways:
        key: Row = {"kind": "size", "way": figure(way), "policy": way}
        rows.measured(key, partial(apart, capacity, way, room))
    for i, way in alternating(ways, rounds):
        key = {"kind": "served", "way": figure(way), "round": i, "requests": load.requests}
        timed = partial(apart, ran, way, room, load.asks(), environment=STEPPED | THREADS)
        rows.measured(key, timed)
    return rows


def figures(rows: list[Row]) -> dict[str, float]:
    """Tokens that fit and tokens a second over those of stock, and the gate over kv-compress."""
    tokens = {str(r["way"]): float(str(r["tokens"])) for r in rows if r["kind"] == "size"}
    fit = {f"tokens_{way}": each / tokens[BF16] for way, each in tokens.items() if way != BF16}
    found = fit | over_bf16(rows)
    served = rates(rows)
    gate, other = figure(POLICIES[2]), figure(POLICIES[1])
    if {gate, other} <= served.keys():
        found["gate_vs_kv_compress"] = served[gate] / served[other]
    return found


def main() -> None:
    """Run everything and write the result."""
    parser = arguments(__doc__, POLICIES)
    parser.add_argument("--rounds", type=count, default=2, help="runs of every engine")
    given = parser.parse_args()
    rows = measure(given.policies, given.rounds, quick=given.quick, minutes=given.minutes)
    rows.finish(figures(rows.rows))


if __name__ == "__main__":
    main()
