"""Tables that compare with the engines that run on CPUs."""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from tools.tables import markdown
from tools.tables.markdown import Row, Said, table

ENGINES: Final = {
    "transformers": "transformers",
    "vllm": "vLLM",
    "openvino": "OpenVINO GenAI",
    "llama.cpp": "llama.cpp",
}
WEIGHTS: Final = {"bf16": "bfloat16", "f16": "float16", "gguf": "Q4_1"}
UNKNOWN: Final = "not measurable"


def named(engine: str, way: str) -> str:
    """Return a way with its engine and without its weights, as in "llama.cpp `q8_0`"."""
    weights, colon, cache = way.partition(":")
    return f"{ENGINES[engine]} `{cache if colon and weights in WEIGHTS else way}`"


def both(text: str) -> str:
    """Return the name of a "ENGINE WAY"."""
    engine, _, way = text.partition(" ")
    return named(engine, way)


def ways(rows: Sequence[Row]) -> str:
    """Write what each way holds and loses, and its times with one sequence and with several."""
    cells = sorted({(row["batch"], row["tokens"]) for row in rows if row["kind"] == "decode"})
    batches = sorted({batch for batch, _ in cells})
    found = {
        (row["engine"], row["way"], row["batch"], row["tokens"]): row
        for row in rows
        if row["kind"] == "decode"
    }
    growth = {
        (row["engine"], row["way"], row["batch"]): row["growth"]
        for row in rows
        if row["kind"] == "growth"
    }
    lines = []
    for engine, way in dict.fromkeys(key[:2] for key in found):
        mine = [row for key, row in found.items() if key[:2] == (engine, way)]
        longest = max(mine, key=lambda row: (row["tokens"], row["batch"]))
        each = longest["kv_bytes"] / longest["batch"] / longest["tokens"]
        lost = UNKNOWN if longest["nats"] is None else f"{longest['nats']:.4f}"
        firsts = [
            _number(found.get((engine, way, *cell)), "first", 1, 2)
            for cell in cells
            if cell[0] == 1
        ]
        steps = [_number(found.get((engine, way, *cell)), "step", 1e3, 1) for cell in cells]
        grown = [
            f"{growth[engine, way, batch]:.2f}" if (engine, way, batch) in growth else ""
            for batch in batches
        ]
        about = (named(engine, way), WEIGHTS[longest["weights"]], f"{each:,.0f}", lost)
        lines.append((*about, *firsts, *steps, *grown))
    head = (
        *("engine and cache", "weights", "bytes a token", "nats a token"),
        *(f"first token, {tokens:,}, s" for batch, tokens in cells if batch == 1),
        *(f"step, {batch} x {tokens:,}, ms" for batch, tokens in cells),
        *(f"growth, batch {batch}" for batch in batches),
    )
    return table(head, lines)


def compared(figure: str) -> str:
    """Write what a figure compares: `decode_vs_best_peer_1k_b1` is a step of one sequence."""
    found = re.fullmatch(r"(decode|growth)_vs_best_peer(?:_(\d+k?))?_b(\d+)", figure)
    if found is None:
        raise ValueError(f"{figure} names no comparison")
    what, tokens, batch = found.groups()
    size = f"{batch} sequence" if batch == "1" else f"{batch} sequences"
    if what == "growth":
        return f"growth of a step with the context, {size}"
    return f"decode step, {size} of {tokens} tokens"


def peers(rows: Sequence[Row]) -> str:
    """Write, of each comparison, every peer and the best of ours that is comparable with it."""
    lines = (
        (
            compared(row["figure"]),
            both(row["peer"]),
            "none" if row["ours"] is None else both(row["ours"]),
            "" if row["ratio"] is None else f"{row['ratio']:.2f}",
        )
        for row in rows
        if row["kind"] == "against"
    )
    return table(("comparison", "peer, best first", "best of ours", "ratio"), lines)


def _number(row: Row | None, name: str, factor: float, digits: int) -> str:
    return "" if row is None else f"{factor * row[name]:.{digits}f}"


def cpu_peers(result: Row, said: Said) -> Iterator[str]:
    """Yield the figures, all ways, and what each figure compares."""
    yield markdown.figures(result, said)
    yield ways(result["rows"])
    yield peers(result["rows"])


WRITERS: Final = {"cpu_peers": cpu_peers}
