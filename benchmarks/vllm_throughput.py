# environment: vllm
"""Output tokens a second of a stock vLLM on a CPU while requests wait: its own caches and ours.

SmolLM2-135M, prompts of 1,024 to 4,096 tokens, answers of 1,024 to 1,280, engines one at a time,
each once a round; every second round goes backwards, so that a drift of the machine hits all alike.
The memory holds four requests of mean length uncompressed, as where contexts are long for the
memory that there is. All requests come at once, and as many run as vLLM admits; a bound on how many
may be given, the same for all. A ratio is of tokens a second over the whole run, medians of rounds.
An engine that holds more of the requests runs half empty for longer at its end, which counts
against it, so rows have the rate while requests waited as well.

Engines run eagerly unless --compiled is given: compiling speeds up what all have in common. Which
policies count as lossless, and which as losing 5 %, is what `vllm_loaded` measured while memory was
short, on needle and multikey by the rule of `kv_eval.calibrate.loss`. Other policies, short
answers and where the time goes are in `vllm_parts`. On a processor with AMX the result is
`vllm_throughput_amx`.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

from _arguments import count
from _vllm_engine import ran
from _vllm_load import Load
from _vllm_process import STEPPED, THREADS, Row, Rows, alternating, apart
from _vllm_served import best, headline, losing, over_bf16, room_of
from _vllm_ways import BF16, FP8, arguments, figure, with_basis

from kv_cpu import runnable

LONG = Load("long", 32, (1024, 4096), (1024, 1280))
QUICK = Load("quick", 6, (128, 256), (24, 32))
RATES = 2, 4, 6, 8
POLICIES = (*(f"kv-compress:rate={rate},short=true+k8v4" for rate in RATES), "k8v4", "leankv")


def measure(
    policies: list[str],
    basis: Path | None,
    together: int | None,
    rounds: int,
    *,
    compiled: bool,
    quick: bool,
    minutes: float | None = None,
) -> Rows:
    """Let all serve the same requests, one after the other, in rounds."""
    ways = (*with_basis(policies, basis), BF16, FP8)
    load = QUICK if quick else LONG
    room = room_of(load, compiled=compiled)
    if together is not None:
        room = replace(room, together=together)
    asked = {"ways": ways, "load": str(load), "room": str(room)}
    name = "vllm_throughput_amx" if "amx" in runnable() else "vllm_throughput"
    rows = Rows(name, asked, quick=quick, minutes=minutes)
    about: Row = {
        "load": load.name,
        "requests": load.requests,
        "together": room.together,
        "kv_bytes": room.kv_bytes,
    }
    for i, way in alternating(ways, rounds):
        key = {"kind": "served", "way": figure(way), "round": i, **about}
        timed = partial(apart, ran, way, room, load.asks(), environment=STEPPED | THREADS)
        rows.measured(key, timed)
    return rows


def main() -> None:
    """Run everything and write the result."""
    parser = arguments(__doc__, POLICIES)
    parser.add_argument(
        "--compiled", action="store_true", help="as vLLM runs by itself, not eagerly"
    )
    parser.add_argument("--together", type=int, help="requests that run at once, at most")
    parser.add_argument("--rounds", type=count, default=2, help="runs of every engine")
    given = parser.parse_args()
    how = {"compiled": given.compiled, "quick": given.quick, "minutes": given.minutes}
    rows = measure(given.policies, given.basis, given.together, given.rounds, **how)
    groups = {} if given.quick else losing()  # what was measured is kept if this is missing
    rows.rows += best(rows.rows, groups)
    rows.finish(headline(rows.rows) | over_bf16(rows.rows))


if __name__ == "__main__":
    main()
