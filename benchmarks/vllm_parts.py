# environment: vllm
"""Where the time of a stock vLLM goes on a CPU, by part, with its own caches and with ours.

SmolLM2-135M. Rows of kind `parts` are shares of a run, whose engine is watched while it serves;
those of kind `served` are tokens a second with short answers, of 256 tokens, where reading prompts
takes most of the time, by runs that are not watched. Memory and rounds are as in `vllm_throughput`,
and so are the figures: a policy's tokens a second over those of stock bf16.
"""

from functools import partial
from pathlib import Path

from _arguments import count
from _vllm_engine import ran
from _vllm_load import Load
from _vllm_parts import parts
from _vllm_process import STEPPED, THREADS, Rows, alternating, apart
from _vllm_served import HELD, over_bf16, room_of
from _vllm_ways import BF16, FP8, arguments, figure, with_basis

SHORT = Load("short", 16, (1024, 4096), (256, 256))
PARTS = Load("parts", 8, (1024, 4096), (128, 128))
QUICK = Load("quick", 6, (128, 256), (24, 32))
POLICIES = (
    *("k8v4", "k4v4", "leankv"),
    *(f"kv-compress:rate={rate}+k8v4" for rate in (2, 4, 8)),
    "{zack}+kv-compress:rate=4+k8v4",
)


def measure(
    policies: list[str],
    basis: Path | None,
    rounds: int,
    *,
    quick: bool,
    minutes: float | None = None,
) -> Rows:
    """Let all serve the same requests, in rounds, then watch each once."""
    ways = (BF16, FP8, *with_basis(policies, basis))
    short, some = (QUICK, QUICK) if quick else (SHORT, PARTS)
    asked = {"ways": ways, "loads": str((short, some)), "held": HELD}
    rows = Rows("vllm_parts", asked, quick=quick, minutes=minutes)
    for kind, load, work, times in (("served", short, ran, rounds), ("parts", some, parts, 1)):
        room = room_of(load, compiled=False)
        about = {"load": load.name, "requests": load.requests, "kv_bytes": room.kv_bytes}
        for i, way in alternating(ways, times):
            key = {"kind": kind, "way": figure(way), "round": i, **about}
            timed = partial(apart, work, way, room, load.asks(), environment=STEPPED | THREADS)
            rows.measured(key, timed)
    return rows


def main() -> None:
    """Run everything and write the result."""
    parser = arguments(__doc__, POLICIES)
    parser.add_argument("--rounds", type=count, default=2, help="runs of every engine not watched")
    given = parser.parse_args()
    rows = measure(
        given.policies, given.basis, given.rounds, quick=given.quick, minutes=given.minutes
    )
    rows.finish(over_bf16(rows.rows))


if __name__ == "__main__":
    main()
