# environment: triton
"""Kernels on a GPU: whether they are right, how near decoding comes to a copy, and what else costs.

Needs torch and triton, and none of our packages installed. Shapes are those of Llama-3.1-8B: 32
query heads over 8 KV heads of 128 dimensions, queries in bfloat16, pages of 16 tokens in random
order with a float32 score for each token where a policy stores one.

Bytes of a pass are those of codes, scales and zeros of all stored tokens; a share is these over the
seconds of the pass, over what a copy from memory to memory moves a second on the same card in the
same run (bytes read and written both counted). Passes are recorded as CUDA graphs of one layer and
timed with events, in turn, so a launch's cost on the host is no part of them; medians over rounds.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import _bare  # noqa: F401  (before what it makes importable)
import _result
import torch

from kv_attention import DenseTokens, attend
from kv_policy import Observe, PagedTokens, PageLayout, RawCodec, TokenFormat
from kv_quant.integer import IntegerCodec

HEADS, GROUP, DIM, TOKENS = 8, 4, 128, 16
SHAPES = {"64x16k": (64, 16_384), "16x64k": (16, 65_536), "1x128k": (1, 131_072)}
QUICK = {"1x32": (1, 32)}
MIXED = 0.2  # of the tokens in the better tier of 20:80
WINDOW = 32  # queries that a prompt is observed from
ROUNDS = 15
SKEW = 1.0  # of a lognormal distribution of the tokens that heads keep
Row = dict[str, object]


def form(key: int | torch.dtype, value: int | torch.dtype) -> TokenFormat:
    """Keys and values as integers of so many bits, or as plain numbers."""
    codecs = [
        IntegerCodec(DIM, x) if isinstance(x, int) else RawCodec(DIM, x) for x in (key, value)
    ]
    return TokenFormat(*codecs)


BF16, K8V4, K4V2 = form(torch.bfloat16, torch.bfloat16), form(8, 4), form(4, 2)
FORMATS: Mapping[str, tuple[tuple[TokenFormat, float], ...]] = {
    "bf16": ((BF16, 1.0),),
    "k8v4": ((K8V4, 1.0),),
    "k4v2": ((K4V2, 1.0),),
    "mixed": ((K8V4, MIXED), (K4V2, 1 - MIXED)),
}


@dataclass(frozen=True)
class Clock:
    """How passes are timed on a device."""

    device: str
    uncaptured: list[str] = field(default_factory=list)  # passes that no graph could be made of

    def turns(self, work: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
        """Median seconds of each, all in turn; a pass is a graph of itself, where there are any.

        A pass that cannot be captured is timed with its launches, and named in `uncaptured`.
        """
        if self.device == "cpu":
            found = {}
            for name, do in work.items():
                began = perf_counter()
                do()
                found[name] = perf_counter() - began
            return found
        passes = {name: self.captured(name, do) for name, do in work.items()}
        spent: dict[str, list[float]] = {name: [] for name in work}
        for i in range(rounds + 2):
            for name, once in passes.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                once()
                end.record()
                end.synchronize()
                if i >= 2:
                    spent[name].append(begin.elapsed_time(end) / 1e3)
        return {name: median(times) for name, times in spent.items()}

    def captured(self, name: str, work: Callable[[], object]) -> Callable[[], object]:
        """What repeats a pass: its graph, or itself."""
        try:
            return self.graph(work).replay
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            torch.cuda.synchronize()  # raises if more is wrong than the capture
            print(f"{name} is not captured: {error}", flush=True)
            self.uncaptured.append(name)
            return work

    def graph(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Run once, so that everything is compiled, then record."""
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph


def stored(
    one: TokenFormat, length: torch.Tensor, longest: int, device: str, *, scores: bool = False
) -> PagedTokens:
    """Table rows of random bytes with small scales, in pages in random order.

    Bytes that are no numbers would cost the same; small ones keep the output finite.
    """
    layout = PageLayout.sized(one, TOKENS, scores)
    need = (length + TOKENS - 1) // TOKENS
    total, columns = int(need.sum()), max(int(need.max()), 1)
    shape = (max(total, 1), layout.nbytes)
    data = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    for offset, rows, size in layout.segments:
        span = data[:, offset : offset + rows * size]
        if size == 4 or isinstance(one.key, RawCodec):  # metadata, or numbers in bfloat16
            span.copy_(torch.full((1,), 0x3C, dtype=torch.uint8, device=device).expand_as(span))
    order = torch.randperm(total, device=device).to(torch.int32)
    place = torch.arange(columns, device=device).expand(*length.shape, -1)
    table = torch.zeros(*length.shape, columns, dtype=torch.int32, device=device)
    table[place < need[..., None]] = order
    return PagedTokens(data, table, length.to(torch.int32), layout, longest=longest)


def nbytes(pages: Sequence[PagedTokens]) -> int:
    """Codes and metadata of all tokens."""
    return sum(int(part.length.sum()) * part.layout.format.nbytes for part in pages)


def tiers(name: str, length: torch.Tensor, device: str) -> list[PagedTokens]:
    """The stored tokens of a way to store."""
    found = []
    for one, share in FORMATS[name]:
        some = (length * share).round().long()
        found.append(stored(one, some, int(some.max()), device))
    return found


def step(batch: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A query of each sequence and head."""
    q = torch.randn(batch, HEADS, GROUP, 1, DIM, device=device, dtype=torch.bfloat16)
    return q, torch.full((batch, 1), 2**30, device=device)


def copy_gbps(clock: Clock, *, quick: bool) -> float:
    """What a copy moves in a second, read and written."""
    size = 1 << (20 if quick else 32)
    if not quick:
        size = min(size, torch.cuda.mem_get_info()[0] // 4)
    source = torch.zeros(size, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    seconds = clock.turns({"copy": lambda: target.copy_(source)}, ROUNDS)["copy"]
    return 2 * size / seconds / 1e9


def decoding(clock: Clock, gbps: float, *, quick: bool) -> list[Row]:
    """Decode steps over pages of every format, beside torch's own attention in bfloat16."""
    return [
        row
        for name, (batch, tokens) in (QUICK if quick else SHAPES).items()
        for row in decoded(clock, gbps, name, batch, tokens)
    ]


def decoded(clock: Clock, gbps: float, name: str, batch: int, tokens: int) -> list[Row]:
    """The decode steps of one shape."""
    q, position = step(batch, clock.device)
    length = torch.full((batch, HEADS), tokens, device=clock.device)
    pages = {each: tiers(each, length, clock.device) for each in FORMATS}
    key, value = (
        torch.randn(batch, HEADS, tokens, DIM, device=clock.device, dtype=torch.bfloat16)
        for _ in range(2)
    )

    def sdpa() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q.flatten(1, 2), key, value, enable_gqa=True
        )

    work: dict[str, Callable[[], object]] = {"sdpa": sdpa}
    work |= {each: ours(q, position, parts, 0) for each, parts in pages.items()}
    work["k8v4_observed"] = ours(q, position, pages["k8v4"], 1)
    seconds = clock.turns(work, ROUNDS)
    rows: list[Row] = []
    for each in work:
        parts = pages.get(each.removesuffix("_observed"), [])
        moved = nbytes(parts) or 2 * key.numel() * 2
        rows.append(
            {
                "kind": "decode",
                "shape": name,
                "way": each,
                "seconds": seconds[each],
                "bytes": moved,
                "share": moved / seconds[each] / 1e9 / gbps,
                "vs_bf16": seconds["bf16"] / seconds[each],
                "vs_sdpa": seconds["sdpa"] / seconds[each],
                "graph": each not in clock.uncaptured,
            }
        )
    return rows


def ours(
    q: torch.Tensor, position: torch.Tensor, parts: list[PagedTokens], last: int | None
) -> Callable[[], torch.Tensor]:
    """A pass of our kernels over pages."""
    what = Observe(last)
    return lambda: attend(q, position, parts, [], DIM**-0.5, what, backend="triton").out


def skewed(clock: Clock, *, quick: bool) -> list[Row]:
    """Heads that keep different numbers of tokens, beside as many tokens evenly spread."""
    batch, tokens = next(iter((QUICK if quick else SHAPES).values()))
    draw = torch.distributions.LogNormal(0.0, SKEW).sample((batch, HEADS))
    length = (draw / draw.sum() * batch * HEADS * tokens / 4).long().clamp(1, tokens)
    even = torch.full_like(length, int(length.sum()) // length.numel())
    q, position = step(batch, clock.device)
    work: dict[str, Callable[[], object]] = {}
    for name, each in (("skewed", length), ("even", even)):
        parts = tiers("k8v4", each.to(clock.device), clock.device)
        work[name] = lambda parts=parts: attend(q, position, parts, [], DIM**-0.5, backend="triton")
    seconds = clock.turns(work, ROUNDS)
    per_token = {
        name: seconds[name] / int(each.sum()) for name, each in (("skewed", length), ("even", even))
    }
    return [
        {
            "kind": "skew",
            "longest_over_mean": float(length.max() / length.float().mean()),
            "seconds": seconds["skewed"],
            "over_balanced": per_token["skewed"] / per_token["even"],
        }
    ]


def scores(clock: Clock, *, quick: bool) -> list[Row]:
    """Prompts, and what it costs to observe them, beside torch's own attention."""
    rows: list[Row] = []
    for tokens in (32,) if quick else (4_096, 16_384):
        shape = (1, HEADS, GROUP, tokens, DIM)
        q = torch.randn(shape, device=clock.device, dtype=torch.bfloat16)
        key, value = (
            torch.randn(1, HEADS, tokens, DIM, device=clock.device, dtype=torch.bfloat16)
            for _ in range(2)
        )
        place = torch.arange(tokens, device=clock.device)[None]
        fresh = [DenseTokens(key, value, place, full=True)]

        def pass_of(
            what: Observe,
            q: torch.Tensor = q,
            place: torch.Tensor = place,
            fresh: list[DenseTokens] = fresh,
        ) -> object:
            return attend(q, place, [], fresh, DIM**-0.5, what, backend="triton")

        def sdpa(
            q: torch.Tensor = q, key: torch.Tensor = key, value: torch.Tensor = value
        ) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                q.flatten(1, 2), key, value, is_causal=True, enable_gqa=True
            )

        seconds = clock.turns(
            {
                "sdpa": sdpa,
                "plain": lambda: pass_of(Observe()),
                "last": lambda: pass_of(Observe(last=WINDOW)),
                "all": lambda: pass_of(Observe(None)),
            },
            ROUNDS,
        )
        for name in ("last", "all"):
            more = seconds[name] - seconds["plain"]
            rows.append(
                {
                    "kind": "scores",
                    "tokens": tokens,
                    "observed": name,
                    "over_flash": more / seconds["sdpa"],
                    "over_own_pass": more / seconds["plain"],
                    "pass_over_flash": seconds["plain"] / seconds["sdpa"],
                }
            )
    return rows


MANAGED = 128  # sequences of the step that `manager` measures


def manager(clock: Clock, *, quick: bool) -> list[Row]:
    """A step of all table rows: a token enters each, and one is re-quantized or dropped."""
    from kv_paging import PagePool, Tiers, fit

    batch, layers = (2, 2) if quick else (MANAGED, 32)
    layouts = fit([K8V4, K4V2], TOKENS, True, True)
    table_rows = layers * batch * HEADS
    pool = PagePool(layouts[0].nbytes, 8 * table_rows, grows=False, device=clock.device)
    every = Tiers(pool, layouts, layers, batch, HEADS)
    ids = every.table_rows()
    key = torch.randn(table_rows, 24, DIM, device=clock.device, dtype=torch.bfloat16)
    keep = torch.ones(table_rows, 24, dtype=torch.bool, device=clock.device)
    score = torch.rand(table_rows, 24, device=clock.device)
    where = torch.arange(24, device=clock.device).expand(table_rows, -1)
    for tier in range(2):
        every.append(tier, ids, key, key, keep, score, where)
    both = torch.zeros(table_rows, dtype=torch.uint8, device=clock.device)
    target = (torch.arange(table_rows, device=clock.device) % 2 + 1).to(torch.uint8)
    target = target.where(target == 1, torch.full_like(target, 255))
    new = (key[:, 0].contiguous(), score[:, 0].contiguous(), where[:, 0].contiguous())

    def once() -> None:
        _, place = every.weakest()
        every.step(both, both, target, place, new[0], new[0], new[1], new[2])

    for _ in range(1 if quick else 3):
        once()
    if clock.device == "cpu":
        return []
    torch.cuda.synchronize()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        once()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return [{"kind": "manager", "streams": table_rows, "us_per_step": median(times)}]


def right(device: str, *, quick: bool) -> list[Row]:
    """Random caches against the oracle, in every format, of odd sizes."""
    from attention_cases import random_case
    from attention_judge import TOLERANCE, assert_same_observation, assert_same_output

    bits = ("8", "4", "2", "1")
    kinds = [(k, v) for k in bits for v in bits] + [("bfloat16", "bfloat16"), ("float16", "8")]
    kinds = kinds[1:2] if quick else kinds
    shapes: list[dict[str, Any]] = [
        {"D": 128, "Dv": 128, "page": 16, "stored": 300, "G": 4, "H": 2},
        {"D": 37, "Dv": 21, "page": 7, "spare": 3, "stored": 90, "G": 3, "padding": "left"},
        {"D": 16, "Dv": 9, "page": 1, "stored": 20, "group": 4, "holes": True, "reverse": True},
    ]
    checked = 0
    for number, kind in enumerate(kinds):
        for shape in shapes:
            for dtype in list(TOLERANCE)[1:]:
                for queries in (1, 4 if quick else 40):
                    c = random_case(number, tiers=[kind], L=queries, window=5, dtype=dtype, **shape)
                    assert_same_output(c.to(device), "triton")
                    checked += 1
        c = random_case(number, tiers=[kind], L=1 + number % 2 * 20, window=5, D=24, Dv=24)
        for what in (Observe(None), Observe(3, "max", 2, 4), Observe(None, "max-of-sums", skip=1)):
            assert_same_observation(c.to(device), what, error=1e-3, backend="triton")
            checked += 1
    return [{"kind": "right", "cases": checked}]


def figures(rows: list[Row], gbps: float) -> dict[str, float]:
    """What is asked of kernels; shares and speed-ups are the worst over shapes."""

    def of(kind: str, name: str, **where: object) -> list[float]:
        found = [row for row in rows if row["kind"] == kind and row.items() >= where.items()]
        return [float(str(row[name])) for row in found]

    summary = {"copy_gbps": gbps}
    for way in FORMATS:
        summary[f"{way}_share"] = min(of("decode", "share", way=way))
        if way != "bf16":
            summary[f"{way}_vs_bf16"] = min(of("decode", "vs_bf16", way=way))
            summary[f"{way}_vs_sdpa"] = min(of("decode", "vs_sdpa", way=way))
    summary["skew_over_balanced"] = max(of("skew", "over_balanced"))
    summary["score_overhead_last_w"] = max(of("scores", "over_flash", observed="last"))
    summary["score_overhead_all"] = max(of("scores", "over_flash", observed="all"))
    steps = of("manager", "us_per_step")
    if steps:
        summary["manager_us_per_step"] = steps[0]
    summary["cases_right"] = sum(of("right", "cases"))
    return summary


def main() -> None:
    """Check, measure, write the result, and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, and no file")
    parser.add_argument("--commit", help="what is measured, where this is no checkout")
    given = parser.parse_args()
    quick = given.quick
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not (quick and os.environ.get("TRITON_INTERPRET") == "1"):
        sys.exit("there is no GPU; --quick with TRITON_INTERPRET=1 tries the script without one")
    clock = Clock(device)
    torch.manual_seed(0)
    rows: list[Row] = []
    gbps = copy_gbps(clock, quick=quick)
    sections: dict[str, Callable[[], list[Row]]] = {
        "right": lambda: right(device, quick=quick),
        "decoding": lambda: decoding(clock, gbps, quick=quick),
        "skewed": lambda: skewed(clock, quick=quick),
        "scores": lambda: scores(clock, quick=quick),
        "manager": lambda: manager(clock, quick=quick),
    }
    for name, section in sections.items():
        print(name, flush=True)
        found = section()
        rows += found
        for row in found:
            print(" ", row, flush=True)
    summary = figures(rows, gbps)
    _result.write("gpu", summary, rows, quick=quick, measured=given.commit)
    for name, value in summary.items():
        print(f"{name:24} {value:.3f}")


if __name__ == "__main__":
    main()
