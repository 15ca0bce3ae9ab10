# environment: vllm
"""Output tokens a second of a stock vLLM on a CPU while requests wait: its own caches and ours.

SmolLM2-135M, prompts of 1,024 to 4,096 tokens, answers of 1,024 to 1,280, engines one at a time.
The memory holds four requests of mean length uncompressed, as where contexts are long for the
memory that there is. All requests come at once, and at most 16 run, so that half of them wait even
where memory would hold more. A ratio is of tokens a second over the whole run; an engine that holds
more of the requests runs half empty for longer at its end, which counts against it, so rows have
the rate while requests waited as well.

Engines run eagerly unless --compiled is given: compiling speeds up what all have in common. Which
policies count as lossless, and which as losing 5 %, is what `vllm_quality` measured under vLLM, on
needle and multikey by the rule of `kv_serve.calibrate.loss`. Other policies, short answers and
where the time goes are in `vllm_parts`.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

from _vllm_engine import ran
from _vllm_load import Load
from _vllm_process import Row, Rows, apart
from _vllm_served import HELD, best, headline, losing, over_bf16, room_of
from _vllm_ways import BF16, FP8, arguments, figure, with_basis

LONG = Load("long", 32, (1024, 4096), (1024, 1280))
QUICK = Load("quick", 6, (128, 256), (24, 32))
TOGETHER = 16  # requests that run at once, at most
POLICIES = ("kv-compress:rate=4+k8v4", "kv-compress:rate=8+k8v4")


def measure(policies: list[str], basis: Path | None, *, compiled: bool, quick: bool) -> Rows:
    """Let all serve the same requests, one after the other."""
    ways = (*with_basis(policies, basis), BF16, FP8)
    load = QUICK if quick else LONG
    asked = {"ways": ways, "load": str(load), "room": str((HELD, TOGETHER)), "compiled": compiled}
    rows = Rows("vllm_throughput", asked, quick=quick)
    room = replace(room_of(load, compiled=compiled), together=TOGETHER)
    about: Row = {
        "load": load.name,
        "requests": load.requests,
        "together": room.together,
        "kv_bytes": room.kv_bytes,
    }
    for way in ways:
        key = {"kind": "served", "way": figure(way), **about}
        rows.measured(key, partial(apart, ran, way, room, load.asks()))
    return rows


def main() -> None:
    """Run everything and write the result."""
    parser = arguments(__doc__, POLICIES)
    parser.add_argument(
        "--compiled", action="store_true", help="as vLLM runs by itself, not eagerly"
    )
    given = parser.parse_args()
    rows = measure(given.policies, given.basis, compiled=given.compiled, quick=given.quick)
    groups = {} if given.quick else losing()  # what was measured is kept if this is missing
    rows.rows += best(rows.rows, groups)
    rows.finish(headline(rows.rows) | over_bf16(rows.rows))


if __name__ == "__main__":
    main()
