# environment: vllm
"""Output tokens a second of a stock vLLM on a CPU: its own caches and ours in the same bytes.

SmolLM2-135M, engines one at a time, in turn. The memory holds seven requests of mean length
uncompressed, so vLLM's own cache is always full and most requests wait, as on a server under load:
enough that a step reads the weights for several, and few enough that a run takes minutes.
All requests come at once and all engines do the same work, so a ratio is of tokens a second over
the whole run. An engine that holds more of the requests runs half empty for longer at the end,
which counts against it; rows have the rate while requests waited as well.
Engines run eagerly unless --compiled is given: compiling speeds up what all have in common.
Rows of kind `parts` say where the time goes, from runs of their own.
"""

from functools import partial
from pathlib import Path
from statistics import median

from _vllm_engine import Room, ran
from _vllm_load import Load, raw_token_bytes
from _vllm_parts import parts
from _vllm_process import Row, Rows, alternating, apart
from _vllm_ways import BF16, FP8, arguments, figure, with_basis

HELD = 7  # requests of mean length, when they end
ROUNDS = 2
LOADS = (
    Load("long", 48, (1024, 4096), (1024, 2048)),
    Load("short", 32, (1024, 4096), (256, 256)),
)
QUICK = (Load("quick", 6, (128, 256), (24, 32)),)
LOSSLESS = ("k8v4", "kv-compress:rate=2+k8v4")  # quality: see `vllm_quality`
LOSS_5 = ("kv-compress:rate=4+k8v4", "kv-compress:rate=8+k8v4")
OTHERS = ("k4v2", "leankv", "kv-compress:rate=4+{zack}+k8v4")


def room_of(load: Load, *, compiled: bool) -> Room:
    """The memory of a load, the same for all."""
    return Room(int(HELD * load.mean) * raw_token_bytes(), load.longest, compiled=compiled)


def measure(
    policies: list[str], basis: Path | None, rounds: int, *, compiled: bool, quick: bool
) -> Rows:
    """Let all serve the same requests in turn, then say where the time of each goes."""
    ways = (BF16, FP8, *with_basis(policies, basis))
    loads, rounds = (QUICK, 1) if quick else (LOADS, rounds)
    asked = {"ways": ways, "loads": str(loads), "held": HELD, "compiled": compiled}
    rows = Rows("vllm_throughput", asked, quick=quick)
    for load in loads:
        room = room_of(load, compiled=compiled)
        about: Row = {"load": load.name, "requests": load.requests, "kv_bytes": room.kv_bytes}
        for i, way in alternating(ways, rounds):
            key = {"kind": "served", "way": figure(way), "round": i, **about}
            rows.measured(key, partial(apart, ran, way, room, load.asks()))
        some = load.asks()[: load.requests // 2]
        for way in ways:
            key = {"kind": "parts", "way": figure(way), **about, "requests": len(some)}
            rows.measured(key, partial(apart, parts, way, room, some))
    return rows


def ratio(rows: list[Row], load: str, way: str, over: str) -> float:
    """The median of the ratios within rounds."""
    found: dict[str, list[float]] = {way: [], over: []}
    for row in rows:
        if row["kind"] == "served" and row["load"] == load and row["way"] in found:
            found[str(row["way"])].append(float(str(row["tokens_per_s"])))
    return median(mine / its for mine, its in zip(found[way], found[over], strict=True))


def figures(rows: list[Row], best: dict[str, tuple[str, ...]]) -> dict[str, float]:
    """For each group of policies, by its name, the best one; and all of them, by load."""
    served = [row for row in rows if row["kind"] == "served"]
    ways = list(dict.fromkeys(str(row["way"]) for row in served))
    loads = list(dict.fromkeys(str(row["load"]) for row in served))
    found = {}
    for group, names in best.items():
        mine = [figure(name) for name in names if figure(name) in ways]
        for over in (BF16, FP8):
            if mine:
                each = [ratio(rows, loads[0], way, over) for way in mine]
                found[f"{group}_vs_{over}"] = max(each)
    for load in loads:
        for way in ways:
            if way != BF16:
                found[f"{load}_{way}_vs_bf16"] = ratio(rows, load, way, BF16)
    return found


def main() -> None:
    """Run everything and write the result."""
    parser = arguments(__doc__, (*LOSSLESS, *LOSS_5, *OTHERS))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="each serves the requests once")
    parser.add_argument(
        "--compiled", action="store_true", help="as vLLM runs by itself, not eagerly"
    )
    given = parser.parse_args()
    size = {"compiled": given.compiled, "quick": given.quick}
    rows = measure(given.policies, given.basis, given.rounds, **size)
    rows.finish(figures(rows.rows, {"lossless": LOSSLESS, "loss5": LOSS_5}))


if __name__ == "__main__":
    main()
