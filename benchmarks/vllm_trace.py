# environment: vllm
"""A trace of a real service, replayed on a stock vLLM: its own caches and ours in the same bytes.

Lengths and times are of a Mooncake trace (Qin et al., 2024, arXiv:2407.00079), whose file is given
with --trace; none of it is part of this repository. Two cores are slow, and vLLM's server computes
on one of them and reserves the other, so SmolLM2-135M answers, prompts are scaled to an eighth and
answers to a half, and the times so that requests come at nine tenths of the rate at which stock
bf16 answers when all of them are there at once. The trace's clock ticks every three seconds of its
own time, and what has the same tick comes together. Text is real; prefixes that the trace shares
are not replayed. A first token counts from the arrival, waiting included. Goodput counts requests
that got their first token and the mean time between tokens within the targets, per second from the
first arrival to the last token.

Steps have at most 512 tokens, so that a prompt does not delay the tokens of others for long. With
fewer, others wait less and prompts longer: stock bf16 and the policies are replayed with 384, too.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import quantiles

from _arguments import count
from _vllm_engine import Room
from _vllm_load import raw_token_bytes, text_ids
from _vllm_process import Row, Rows, alternating, apart
from _vllm_trace import Answered, Arrival, Scale, asks_of, at_rate, read_trace, replayed
from _vllm_ways import BF16, FP8, arguments, figure, with_basis

POLICIES = ("kv-compress:rate=4+k8v4", "k8v4")
HELD = 6144  # tokens of stock in the same bytes: three or four requests
LOAD = 0.9  # of what stock can answer
CHUNK, FEWER = 512, 384  # tokens of a step
# As users run it: the engine beside the server, which binds its own threads.
SERVER = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
FIGURES = ("ttft_p99", "tbt_p99", "goodput")


@dataclass(frozen=True, slots=True)
class Target:
    """What a user accepts, in seconds."""

    ttft: float
    between: float  # tokens, the mean of a request


def quantile(values: list[float], percent: int) -> float:
    """Of at least two values."""
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def described(seconds: float, answers: list[Answered], target: Target) -> Row:
    """The times of a replay."""
    first = [each.ttft for each in answers]
    between = [gap for each in answers for gap in each.between]
    good = sum(each.ttft <= target.ttft and each.mean_between <= target.between for each in answers)
    return {
        "seconds": seconds,
        "ttft_p50": quantile(first, 50),
        "ttft_p99": quantile(first, 99),
        "tbt_p50": quantile(between, 50),
        "tbt_p99": quantile(between, 99),
        "good_requests": good,
        "goodput": good / seconds,
        "output_tokens_per_s": sum(len(each.tokens) for each in answers) / seconds,
    }


def measure(
    trace: Path,
    policies: list[str],
    basis: Path | None,
    target: Target,
    rounds: int,
    *,
    quick: bool,
    minutes: float | None = None,
) -> Rows:
    """Find the rate that stock can answer, and replay the trace at a part of it under all."""
    own = with_basis(policies, basis)
    cells = [(way, CHUNK) for way in (BF16, *(() if quick else (FP8,)), *own)]
    cells += [(way, FEWER) for way in (() if quick else (BF16, *own))]
    if quick:
        scale, held = Scale(1 / 128, 1 / 64, longest=512, requests=24), 1024
    else:
        scale, held = Scale(), HELD
    room = Room(held * raw_token_bytes(), scale.longest, chunk=CHUNK)
    arrivals, left_out = read_trace(trace, scale)
    asks = asks_of(arrivals, text_ids())
    asked = {"trace": trace.name, "cells": cells, "scale": str(scale), "target": str(target)}
    rows = Rows("vllm_trace", {**asked, "room": str(room)}, quick=quick, minutes=minutes)

    def replay(way: str, chunk: int, when: list[Arrival]) -> Row:
        short = replace(room, chunk=chunk)
        return described(*apart(replayed, way, short, when, asks, environment=SERVER), target)

    about: Row = {"requests": len(asks), "left_out": left_out, "kv_bytes": room.kv_bytes}
    at_once = [Arrival(0.0, each.prompt, each.answer) for each in arrivals]
    first = partial(replay, BF16, CHUNK, at_once)
    most = rows.measured({"kind": "at once", "way": BF16, "chunk": CHUNK, **about}, first)
    rate = LOAD * len(asks) / float(str(most["seconds"]))
    about |= {"rate": rate, "target_ttft": target.ttft, "target_tbt": target.between}
    for i, (way, chunk) in alternating(cells, rounds):
        key = {"kind": "trace", "way": figure(way), "chunk": chunk, "round": i, **about}
        rows.measured(key, partial(replay, way, chunk, at_rate(arrivals, rate)))
    return rows


def figures(rows: list[Row], first: str) -> dict[str, float]:
    """Means over rounds, over those of stock with `CHUNK` tokens; the first policy has no name."""
    means: dict[tuple[object, object], dict[str, float]] = {}
    for row in (row for row in rows if row["kind"] == "trace"):
        mine = means.setdefault((row["way"], row["chunk"]), dict.fromkeys(FIGURES, 0.0))
        for name in FIGURES:
            mine[name] += float(str(row[name]))
    stock = means.pop((BF16, CHUNK))
    found = {}
    for (way, chunk), mine in means.items():
        label = "" if way == first else f"_{way}"
        label += "" if chunk == CHUNK else f"_chunk_{chunk}"
        for name in FIGURES:
            if stock[name]:  # stock may miss the targets every time; then there is no ratio
                found[f"{name}{label}_vs_bf16"] = mine[name] / stock[name]
    return found


def main() -> None:
    """Run everything and write the result."""
    parser = arguments(__doc__, POLICIES)
    parser.add_argument("--trace", type=Path, required=True, help="JSON lines of a Mooncake trace")
    parser.add_argument("--ttft", type=float, default=30.0, help="target, seconds")
    parser.add_argument("--tbt", type=float, default=0.3, help="target, seconds between tokens")
    parser.add_argument("--rounds", type=count, default=1, help="replays under every engine")
    given = parser.parse_args()
    target = Target(given.ttft, given.tbt)
    rows = measure(
        given.trace,
        given.policies,
        given.basis,
        target,
        given.rounds,
        quick=given.quick,
        minutes=given.minutes,
    )
    rows.finish(figures(rows.rows, figure(given.policies[0])))


if __name__ == "__main__":
    main()
