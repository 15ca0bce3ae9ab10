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
from statistics import mean

import _result
from _vllm_engine import Room, ran
from _vllm_load import Load, raw_token_bytes
from _vllm_parts import parts
from _vllm_process import Row, Rows, apart
from _vllm_ways import BF16, FP8, arguments, figure, with_basis

from kv_serve.calibrate.loss import loss

HELD = 4  # requests of mean length, when they end
LONG = Load("long", 16, (1024, 4096), (1024, 1280))
SHORT = Load("short", 16, (1024, 4096), (256, 256))
PARTS = Load("parts", 8, (1024, 4096), (128, 128))
QUICK = Load("quick", 6, (128, 256), (24, 32))
FIRST = ("kv-compress:rate=2+k8v4", "kv-compress:rate=4+k8v4")
OTHERS = ("k8v4", "k4v4", "leankv", "kv-compress:rate=8+k8v4", "kv-compress:rate=4+{zack}+k8v4")
GROUPS = {"lossless": 0.0, "loss5": 0.05}  # what of an answer task's score may be lost
TASKS = ("needle", "multikey")


def room_of(load: Load, *, compiled: bool) -> Room:
    """The memory of a load, the same for all."""
    return Room(int(HELD * load.mean) * raw_token_bytes(), load.longest, compiled=compiled)


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


def ratio(rows: list[Row], load: str, way: str, over: str) -> float:
    """The mean of the ratios of the rounds that both ran in."""
    found: dict[str, dict[object, float]] = {way: {}, over: {}}
    for row in rows:
        if row["kind"] == "served" and row["load"] == load and row["way"] in found:
            found[str(row["way"])][row["round"]] = float(str(row["tokens_per_s"]))
    return mean(mine / found[over][i] for i, mine in found[way].items())


def losing() -> dict[str, set[str]]:
    """By group, the policies that lose no more than it allows, under vLLM.

    Raises:
        FileNotFoundError: the benchmark `vllm_quality` has not been run.
    """
    measured = _result.rows_of("vllm_quality")
    scores = {row["way"]: row for row in measured if row["kind"] == "vllm"}
    stock = scores.pop(BF16)
    return {
        group: {
            way
            for way, mine in scores.items()
            if all(loss(mine[task], stock[task], task).within(allowed) for task in TASKS)
        }
        for group, allowed in GROUPS.items()
    }


def best(rows: list[Row], load: str, groups: dict[str, set[str]]) -> list[Row]:
    """For each group the policy that serves the most tokens a second."""
    ways = {str(row["way"]) for row in rows if row["kind"] == "served"} - {BF16, FP8}
    found: list[Row] = []
    for group, names in groups.items():
        mine = {way: ratio(rows, load, way, BF16) for way in sorted(names & ways)}
        if mine:
            found.append({"kind": "best", "group": group, "way": max(mine, key=mine.__getitem__)})
    return found


def figures(rows: list[Row]) -> dict[str, float]:
    """For each group of policies the best one, over stock; and all of them, by load."""
    served = [row for row in rows if row["kind"] == "served"]
    loads = list(dict.fromkeys(str(row["load"]) for row in served))
    found = {}
    for row in (row for row in rows if row["kind"] == "best"):
        for over in (BF16, FP8):
            found[f"{row['group']}_vs_{over}"] = ratio(rows, loads[0], str(row["way"]), over)
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
