"""Rows of all ways, and the figures that compare the best of ours with the best of the peers.

At equal work a peer reads weights of 16 bits. Ours is comparable with a peer if it holds no more
bytes at the longest context and its nats per token of the same text are no more than `MARGIN`
above the peer's: an engine's arithmetic alone makes some difference.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from _plan import SIXTEEN

MARGIN: Final = 0.01  # nats per token
Row = dict[str, Any]


def gathered(found: Iterable[Mapping[str, Any]]) -> list[Row]:
    """A row of each way, batch and length, with the nats of the way."""
    rows = list(found)
    nats = {(row["engine"], row["way"]): row["nats"] for row in rows if row["kind"] == "nats"}
    return [
        {
            "kind": "decode",
            "batch": row["batch"],
            "tokens": row["tokens"],
            **each,
            "nats": nats[each["engine"], each["way"]],
        }
        for row in rows
        if row["kind"] == "cell"
        for each in row["ways"]
    ]


def grown(rows: Sequence[Row]) -> list[Row]:
    """The growth of a step in ms per 1,000 tokens of context, from the shortest to the longest."""
    found = []
    for batch, engine, way in dict.fromkeys((r["batch"], r["engine"], r["way"]) for r in rows):
        mine = [r for r in rows if (r["batch"], r["engine"], r["way"]) == (batch, engine, way)]
        mine.sort(key=lambda row: int(row["tokens"]))
        short, long = mine[0], mine[-1]
        if short is long:
            continue
        ms = 1e3 * (long["step"] - short["step"])
        named = {name: long[name] for name in ("engine", "way", "ours", "weights", "kv_bytes")}
        about = {"kind": "growth", "batch": batch, **named, "nats": long["nats"]}
        found.append({**about, "growth": ms / (long["tokens"] - short["tokens"]) * 1000})
    return found


def equal(rows: Iterable[Row]) -> list[Row]:
    """Those that read weights of 16 bits."""
    return [row for row in rows if row["weights"] in SIXTEEN]


def comparable(ours: Row, peer: Row) -> bool:
    """Whether ours costs no more bytes and no more nats; False where nats are not known."""
    if ours["nats"] is None or peer["nats"] is None:
        return False
    return bool(ours["kv_bytes"] <= peer["kv_bytes"] and ours["nats"] <= peer["nats"] + MARGIN)


def against(rows: Sequence[Row], cost: Callable[[Row], float], figure: str) -> list[Row]:
    """For each peer the best of ours that is comparable: the peer's cost over that of ours.

    A growth of nothing or less is noise, which is compared with nothing.
    """
    found = []
    for peer in (row for row in rows if not row["ours"]):
        allowed = [row for row in rows if row["ours"] and comparable(row, peer)]
        best = min(allowed, key=cost, default=None)
        if best is not None and min(cost(best), cost(peer)) <= 0:
            best = None
        found.append(
            {
                "kind": "against",
                "figure": figure,
                "peer": f"{peer['engine']} {peer['way']}",
                "known": peer["nats"] is not None,
                "cost": cost(peer),
                "ours": None if best is None else f"{best['engine']} {best['way']}",
                "ratio": None if best is None else cost(peer) / cost(best),
            }
        )
    return sorted(found, key=lambda row: float(row["cost"]))


def compared(rows: Sequence[Row]) -> list[Row]:
    """All comparisons of ours with peers, of decoding and of growth, the best peer first."""
    found = []
    growth = grown(rows)
    for batch in sorted({row["batch"] for row in rows}):
        mine = [row for row in rows if row["batch"] == batch]
        for tokens in sorted({row["tokens"] for row in mine}):
            cell = equal(row for row in mine if row["tokens"] == tokens)
            name = f"decode_vs_best_peer_{size(tokens)}_b{batch}"
            found += against(cell, lambda row: float(row["step"]), name)
        name = f"growth_vs_best_peer_b{batch}"
        each = equal(row for row in growth if row["batch"] == batch)
        found += against(each, lambda row: float(row["growth"]), name)
    return found


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """The best peer's cost over ours, and times of prompts.

    The best peer is the one of least cost whose nats are known. A figure is left out where no way
    of ours is comparable with it.
    """
    best: dict[str, Row] = {}
    for row in compared(rows):
        if row["known"]:
            best.setdefault(row["figure"], row)
    found = {name: row["ratio"] for name, row in best.items() if row["ratio"] is not None}
    both = [value for name, value in found.items() if name.startswith("growth_")]
    if both:
        found["growth_vs_best_peer"] = min(both)
    for tokens in sorted({row["tokens"] for row in rows if row["batch"] == 1}):
        cell = equal(row for row in rows if (row["batch"], row["tokens"]) == (1, tokens))
        ours, peers = (
            min(float(row["first"]) for row in cell if row["ours"] is side)
            for side in (True, False)
        )
        found[f"ttft_vs_best_peer_{size(tokens)}"] = peers / ours
    return found


def size(tokens: int) -> str:
    """A context's name.

    >>> size(7680)
    '8k'
    """
    return f"{round(tokens / 1024)}k" if tokens >= 1024 else f"{tokens}"
