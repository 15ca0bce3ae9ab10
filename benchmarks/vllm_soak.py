# environment: vllm
"""Two thousand requests of random lengths on an engine whose memory is too small for them.

So many go to the first policy, and fewer to the others and to stock. A fifth is given up at a
random step, waiting, preempted or running. The block pool must be as full at the end as at the
start, and every request that was not given up answered with as many tokens as it asked for. The run
fails if no step goes on with anything, or one takes minutes.
"""

import faulthandler
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from _vllm_engine import Room, started
from _vllm_load import raw_token_bytes, text_ids
from _vllm_process import Row, Rows, apart
from _vllm_soak import Soak, Soaking
from _vllm_ways import BF16, arguments, canonical, figure, with_basis

FIRST = "kv-compress:rate=4+k8v4"  # serves all requests; the others fewer
POLICIES = (FIRST, "k8v4", "leankv", "{zack}", "kv-compress:rate=4+{zack}+k8v4")
FEWER = 400
HELD = 768  # tokens of stock in the same bytes: a twelfth of what 48 requests want at their end
TIMEOUT = 600  # seconds of a step


def soaked(way: str, room: Room, soak: Soak) -> Row:
    """Run one soak in this process."""
    with started(way, room) as (engine, _):
        soaking = Soaking(engine, soak, text_ids())
        step = soaking.engine.step

        def watched() -> object:
            faulthandler.dump_traceback_later(TIMEOUT, exit=True)
            return step()

        engine.step = watched
        outcome = asdict(soaking.run())
        faulthandler.cancel_dump_traceback_later()
        return outcome


def measure(
    policies: list[str], basis: Path | None, *, quick: bool, minutes: float | None = None
) -> Rows:
    """Soak every policy, and stock."""
    ways = (BF16, *with_basis(policies, basis))
    soak = Soak(requests=24, together=8, prompt=(16, 300), answer=(1, 24)) if quick else Soak()
    held = 1024 if quick else HELD
    longest = soak.prompt[1] + soak.answer[1]
    room = Room(held * raw_token_bytes(), longest, chunk=256)
    rows = Rows(
        "vllm_soak",
        {"ways": ways, "soak": str(soak), "room": str(room)},
        quick=quick,
        minutes=minutes,
    )
    for way in ways:
        # As many bytes for all, so the fewer a policy stores, the more requests it takes.
        key: Row = {"way": figure(way), "kv_bytes": room.kv_bytes}
        asked = soak if quick or way == canonical(FIRST) else replace(soak, requests=FEWER)
        rows.measured(key, partial(apart, soaked, way, room, asked))
    return rows


def figures(rows: list[Row]) -> dict[str, float]:
    """The sums over all policies."""
    ours = [row for row in rows if row["way"] != BF16]
    names = ("requests", "aborted", "preemptions", "leaked_blocks", "unanswered")
    return {name: float(sum(int(str(row[name])) for row in ours)) for name in names}


def main() -> None:
    """Run everything and write the result."""
    given = arguments(__doc__, POLICIES).parse_args()
    rows = measure(given.policies, given.basis, quick=given.quick, minutes=given.minutes)
    rows.finish(figures(rows.rows))


if __name__ == "__main__":
    main()
