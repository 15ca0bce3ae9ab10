"""The figures of a run on a GPU, and which of them fall short of what is asked."""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import gpu

Row = Mapping[str, Any]
LAYERS: Final = 32
MOST: Final = "64x16k"  # the shape at which figures are asked
# The least that is asked of a figure, or the most.
ASKED: Final[Mapping[str, tuple[str, float]]] = {
    "bf16_share": (">=", 0.75),
    "k8v4_share": (">=", 0.75),
    "k4v2_share": (">=", 0.75),
    "k8v4_vs_bf16": (">=", 2.0),
    "k4v2_vs_bf16": (">=", 3.7),
    "skew_over_balanced": ("<=", 1.15),
    "score_overhead_last_w": ("<=", 0.05),
    "manager_share": ("<=", 0.005),
    "cases_wrong": ("<=", 0),
    "waits_cache_k8v4": ("<=", 0),
    "waits_cache_kv_compress": ("<=", 0),
    "waits_cache_leankv": ("<=", 0),
}
SHORT: Final = {"kv-compress:rate=4+k8v4": "kv_compress"}


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Compute all figures for which there are rows."""
    found: dict[str, float] = {}
    for part in (_right, _decode, _others, _steps, _whole):
        try:
            found |= {name: float(value) for name, value in part(rows)}
        except Exception:  # rows are kept even where no figure can be made of them
            traceback.print_exc()
    return found


def named(policy: str) -> str:
    """A policy in the name of a figure."""
    return SHORT.get(policy, policy).replace(" ", "_")


def of(rows: Sequence[Row], kind: str, **where: object) -> list[Row]:
    """The rows of a kind."""
    return [row for row in rows if row["kind"] == kind and row.items() >= where.items()]


def wrong(rows: Sequence[Row]) -> list[Row]:
    """Cases of correctness that are wrong, or could not be compared."""
    bad = [row for row in of(rows, "right") if not row["ok"]]
    return bad + [
        row for kind in ("failed", "died") for row in of(rows, kind) if row["part"] == "right"
    ]


def _right(rows: Sequence[Row]) -> Iterator[tuple[str, float]]:
    for row in of(rows, "copy"):
        yield "copy_gbps", row["gbps"]
    if any(row.get("part") == "right" for row in rows):
        yield "cases_right", sum(bool(row["ok"]) for row in of(rows, "right"))
        yield "cases_wrong", len(wrong(rows))
        yield "cases_left_out", len(of(rows, "left out", part="right"))


def _decode(rows: Sequence[Row]) -> Iterator[tuple[str, float]]:
    shapes: dict[str, dict[str, float]] = {row["shape"]: {} for row in of(rows, "decode")}
    for row in of(rows, "decode"):
        shapes[row["shape"]][row["way"]] = row["seconds"]
    fastest = {
        shape: min(
            ways["bf16"],
            ways["sdpa"],
            *(row["seconds"] for row in of(rows, "rival", shape=shape, ok=True)),
        )
        for shape, ways in shapes.items()
        if {"bf16", "sdpa"} <= ways.keys()
    }
    for way in gpu.FORMATS:
        shares = {row["shape"]: row["share"] for row in of(rows, "decode", way=way)}
        yield from _most(f"{way}_share", shares)
        if way != "bf16":
            there = [shape for shape in fastest if way in shapes[shape]]
            ratios = {s: fastest[s] / shapes[s][way] for s in there}
            yield from _most(f"{way}_vs_bf16", ratios)
            own = {s: shapes[s]["bf16"] / shapes[s][way] for s in there}
            yield from _most(f"{way}_vs_own_bf16", own)
    if fastest:
        yield from _most("bf16_vs_fastest", {s: x / shapes[s]["bf16"] for s, x in fastest.items()})


def _most(name: str, by_shape: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """A figure at the shape at which it is asked, and the least over shapes."""
    if MOST in by_shape:
        yield name, by_shape[MOST]
    if by_shape:
        yield f"{name}_least", min(by_shape.values())


def _others(rows: Sequence[Row]) -> Iterator[tuple[str, float]]:
    for row in of(rows, "skew"):
        yield "skew_over_balanced", row["over_balanced"]
    for name, observed in (("last_w", "last"), ("all", "all")):
        over = [row["over_flash"] for row in of(rows, "scores", observed=observed)]
        if over:
            yield f"score_overhead_{name}", max(over)
    passes = [row["pass_over_flash"] for row in of(rows, "scores")]
    if passes:
        yield "prompt_over_flash", max(passes)
    for row in of(rows, "manager"):
        yield "manager_us_per_step", row["us_per_step"]
        for step in of(rows, "decode", shape=MOST, way="mixed"):
            # Attention alone of as many sequences in all layers, which is less than the step.
            whole = step["seconds"] * LAYERS * gpu.MANAGED / gpu.SHAPES[MOST][0]
            yield "manager_share", row["us_per_step"] / 1e6 / whole


def _steps(rows: Sequence[Row]) -> Iterator[tuple[str, float]]:
    for row in of(rows, "steps"):
        if "launches" in row:
            yield f"launches_{row['host']}_{named(row['policy'])}", row["launches"]
    for row in of(rows, "waits"):
        yield f"waits_{row['host']}_{named(row['policy'])}", sum(row["waits"].values())
    for row in of(rows, "step time"):
        yield f"step_ms_{row['host']}_{named(row['policy'])}", row["ms"]


def _whole(rows: Sequence[Row]) -> Iterator[tuple[str, float]]:
    for row in of(rows, "generate"):
        name = f"{named(row['way'])}_b{row['batch']}"
        yield f"ms_per_token_{name}", row["ms_per_token"]
        yield f"peak_gib_{name}", row["peak_gib"]
        yield f"cache_mib_{name}", row["cache_mib"]
    for row in of(rows, "served"):
        yield f"vllm_tokens_per_s_{named(row['way'])}", row["tokens_per_s"]
    tokens = {row["way"]: row["tokens"] for row in of(rows, "tokens")}
    if {"stock", "raw"} <= tokens.keys():
        yield "vllm_raw_equal", tokens["stock"] == tokens["raw"]


HOLDS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    ">=": lambda value, bound: value >= bound,
    "<=": lambda value, bound: value <= bound,
}


def short(summary: Mapping[str, float]) -> list[str]:
    """Say which figures fall short, or are missing."""
    found = []
    for name, (sign, bound) in ASKED.items():
        if name not in summary:
            found.append(f"{name} was not measured; asked: {sign} {bound:g}")
        elif not HOLDS[sign](summary[name], bound):
            found.append(f"{name} is {summary[name]:.4g}; asked: {sign} {bound:g}")
    return found
