# environment: vllm
"""Output tokens a second of a stock vLLM on a CPU: its own caches and ours in the same bytes.

SmolLM2-135M, engines one at a time, in turn. The memory holds four requests of mean length
uncompressed, as where contexts are long for the memory that there is, so vLLM's own cache is always
full and most requests wait. All requests come at once and all engines do the same work, so a ratio
is of tokens a second over the whole run. An engine that holds more of the requests runs half empty
for longer at the end, which counts against it; rows have the rate while requests waited as well.
Engines run eagerly unless --compiled is given: compiling speeds up what all have in common.

Stock bf16 and the policies of FIRST run twice, so that a drift shows; the others once, and are
compared with the first round. Only those and fp8 answer the short requests. Which policies count as
lossless, and which as losing 5 %, is what `vllm_quality` measured under vLLM, on needle and
multikey by the rule of `kv_serve.calibrate.loss`.
Rows of kind `parts` say where the time goes, from runs of their own.
"""

from functools import partial
from pathlib import Path

from _vllm_engine import Room, ran
from _vllm_load import Load
from _vllm_parts import parts
from _vllm_process import Row, Rows, apart
from _vllm_served import HELD, best, headline, losing, ratio, room_of
from _vllm_ways import BF16, FP8, arguments, figure, with_basis

LONG = Load("long", 16, (1024, 4096), (1024, 1280))
SHORT = Load("short", 16, (1024, 4096), (256, 256))
PARTS = Load("parts", 8, (1024, 4096), (128, 128))
QUICK = Load("quick", 6, (128, 256), (24, 32))
FIRST = ("kv-compress:rate=2+k8v4", "kv-compress:rate=4+k8v4")
OTHERS = ("k8v4", "k4v4", "leankv", "kv-compress:rate=8+k8v4", "kv-compress:rate=4+{zack}+k8v4")


def measure(policies: list[str], basis: Path | None, *, compiled: bool, quick: bool) -> Rows:
    """Let all serve the same requests in turn, then say where the time of each goes."""
    ways = (BF16, FP8, *with_basis(policies, basis))
    brief = tuple(way for way in ways if way in (BF16, FP8, *FIRST))
    again = tuple(way for way in brief if way != FP8)
    long, short, some = (QUICK, QUICK, QUICK) if quick else (LONG, SHORT, PARTS)
    asked = {"ways": ways, "loads": str((long, short, some)), "held": HELD, "compiled": compiled}
    rows = Rows("vllm_throughput", asked, quick=quick)

    def about(load: Load, room: Room) -> Row:
        return {"load": load.name, "requests": load.requests, "kv_bytes": room.kv_bytes}

    for load, i, each in ((long, 0, ways), (short, 0, brief), (long, 1, again[::-1])):
        room = room_of(load, compiled=compiled)
        for way in each:
            key = {"kind": "served", "way": figure(way), "round": i, **about(load, room)}
            rows.measured(key, partial(apart, ran, way, room, load.asks()))
    room = room_of(some, compiled=compiled)
    for way in ways:
        key = {"kind": "parts", "way": figure(way), **about(some, room)}
        rows.measured(key, partial(apart, parts, way, room, some.asks()))
    return rows


def figures(rows: list[Row]) -> dict[str, float]:
    """For each group of policies the best one, over stock; and all of them, by load."""
    served = [row for row in rows if row["kind"] == "served"]
    loads = list(dict.fromkeys(str(row["load"]) for row in served))
    found = headline(rows, loads[0])
    for load in loads:
        for way in dict.fromkeys(str(row["way"]) for row in served if row["load"] == load):
            if way != BF16:
                found[f"{load}_{way}_vs_bf16"] = ratio(rows, load, way, BF16)
    return found


def main() -> None:
    """Run everything and write the result."""
    parser = arguments(__doc__, (*FIRST, *OTHERS))
    parser.add_argument(
        "--compiled", action="store_true", help="as vLLM runs by itself, not eagerly"
    )
    given = parser.parse_args()
    rows = measure(given.policies, given.basis, compiled=given.compiled, quick=given.quick)
    groups = {} if given.quick else losing()  # what was measured is kept if this is missing
    rows.rows += best(rows.rows, LONG.name, groups)
    rows.finish(figures(rows.rows))


if __name__ == "__main__":
    main()
