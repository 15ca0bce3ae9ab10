"""The pictures of the documentation, drawn from benchmark results.

`python -m tools.figures` writes them; a test fails if one is out of date.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tools.drawing import INK, MARK, OTHER, band, box, frame, heat, line, svg, words

ROOT: Final = Path(__file__).parent.parent
RESULTS: Final = ROOT / "benchmarks" / "results"
IMAGES: Final = ROOT / "docs" / "images"
SOURCES: Final = ("peers", "gate", "method_figures", "rotation_errors")
START: Final = IMAGES / "start.svg"
METHODS: Final = IMAGES / "methods"
PEERS_SAMPLES: Final = 16
GATE_SAMPLES: Final = 64
ROTATIONS: Final = {
    "plain": "no rotation",
    "hadamard": "hadamard",
    "centred": "hadamard:file=F",
    "pair": "with pair=true",
}
SCALES: Final = {
    "plain": "no scales",
    "scaled": "channel-scale",
    "scaled_keys": "with keys=true",
    "hadamard": "hadamard",
}


@dataclass(frozen=True, slots=True)
class Found:
    """A row of the first page's picture.

    Attributes:
        label: the configuration.
        stock: whether it is one of vLLM without a policy.
        held: bytes of the cache over those of 16 bits.
        samples: prompts of each task and setting.
        inside: how many numbers were found, hidden alone and among four, question in the prompt.
        after: the same with the question after the compressed prompt.
    """

    label: str
    stock: bool
    held: float
    samples: int
    inside: tuple[int, int]
    after: tuple[int, int]


# Rows of the comparison with peers (environment and name), and of the gate (name).
PEERS: Final = {
    "fp8 of stock vLLM": ("vllm", "fp8"),
    "k8v4": ("ours", "k8v4"),
}
GATE: Final = {
    "bf16, not compressed": "full",
    "kv-compress: a third of the tokens, 4 bits": "kv_compress_12",
    "gate: a third of the tokens, 4 bits": "gate_recent_12",
}

Row = Mapping[str, Any]


def result(name: str) -> dict[str, Any]:
    """Load a benchmark's result."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def measured() -> tuple[Found, ...]:
    """Return the rows of the first page's picture: stock first, then ours."""
    peers = {
        (row["environment"], row["way"], row["task"], row["setting"]): row
        for row in result("peers")["rows"]
        if row["kind"] == "way"
    }
    gate = {
        (row["name"], row["task"], row["setting"]): row
        for row in result("gate")["rows"]
        if row["kind"] == "cell" and row["samples"] == GATE_SAMPLES
    }
    found = {
        label: Found(
            label,
            name == "full",
            gate[name, "needle", "agnostic"]["bytes"],
            GATE_SAMPLES,
            *_found(
                {at[1:]: row["mean"] for at, row in gate.items() if at[0] == name}, GATE_SAMPLES
            ),
        )
        for label, name in GATE.items()
    }
    for label, way in PEERS.items():
        mine = {at[2:]: row for at, row in peers.items() if at[:2] == way}
        scores = {at: row["score"] for at, row in mine.items()}
        held = mine["needle", "aware"]["held"]
        counts = _found(scores, PEERS_SAMPLES)
        found[label] = Found(label, way[0] == "vllm", held, PEERS_SAMPLES, *counts)
    first, *others = GATE
    return tuple(found[label] for label in (first, *PEERS, *others))


def _found(
    shares: Mapping[tuple[str, str], float], samples: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the numbers found, alone and of four, with the question inside and after."""
    inside, after = (
        (round(samples * shares["needle", setting]), round(samples * shares["multikey", setting]))
        for setting in ("aware", "agnostic")
    )
    return inside, after


def start() -> str:
    """Draw what is found with the question in the prompt and after it, and the bytes held."""
    columns = (232, 286, 346, 400)
    parts = [
        words(0, 30, "bytes, over 16 bits", bold=True),
        words(286, 14, "question inside", "end", bold=True),
        words(400, 14, "question after", "end", bold=True),
    ]
    parts += [
        words(x, 30, title, "end") for x, title in zip(columns, 2 * ("one", "of four"), strict=True)
    ]
    rows = measured()
    for i, row in enumerate(rows):
        y = 36 + 34 * i
        length = 140 * row.held
        parts += [
            words(0, y + 14, row.label),
            box(0, y + 19, length, 11, INK if row.stock else MARK),
            words(length + 6, y + 29, f"{row.held:.2f}"),
        ]
        for x, right in zip(columns, (*row.inside, *row.after), strict=True):
            parts.append(words(x, y + 29, f"{right}/{row.samples}", "end"))
    return svg(402, 38 + 34 * len(rows), "Bytes of the cache, and numbers found", parts)


def spoken() -> str:
    """Return the alternative text of that picture."""
    shown = [
        f"{row.label}: {row.held:.2f} of the bytes, {row.inside[0]} and {row.inside[1]} inside, "
        f"{row.after[0]} and {row.after[1]} after, of {row.samples}"
        for row in measured()
    ]
    return (
        "Bytes of the cache over 16 bits, and numbers found, one hidden and one of four, with the "
        f"question inside the prompt and after it. {'; '.join(shown)}."
    )


def numbers(text: str) -> list[float]:
    """Parse a row of numbers, stored as text so that a row is one line."""
    return [float(each) for each in text.split()]


def kept(row: Row) -> str:
    """Draw which tokens a method keeps, by layer and position, and how many each head keeps."""
    rows = [numbers(each) for each in row["kept"]]
    heads = [numbers(each) for each in row["heads"]]
    tokens, layers, count = row["tokens"], len(rows), len(heads[0])
    wide, high = 448 / len(rows[0]), 6.0
    bottom = 26 + high * layers
    parts = [
        *_layers(layers, high),
        words(34, 16, row["counted"]),
        frame(34, 26, 448, high * layers),
        heat(rows, row["bin"] * count, (34, 26), (wide, high)),
        *(_tick(34 + 448 * i / 4, bottom, f"{tokens * i // 4:,}") for i in range(5)),
        words(258, bottom + 32, "position in the text", "middle"),
        words(520, 16, "of each KV head"),
        frame(520, 26, 24 * count, high * layers),
        heat(heads, max(map(max, heads)) or 1, (520, 26), (24, high), OTHER),
        *(_tick(532 + 24 * head, bottom, str(head)) for head in range(count)),
        words(520 + 12 * count, bottom + 32, _span(heads), "middle"),
    ]
    return svg(660, bottom + 40, f"{row['policy']}: {row['counted']}", parts)


def channels(row: Row) -> str:
    """Draw which key channels heads keep, by layer."""
    rows = [numbers(each) for each in row["key"]]
    high = 6.0
    bottom = 26 + high * len(rows)
    dims = len(rows[0])
    parts = [
        *_layers(len(rows), high),
        words(34, 16, f"KV heads, of {row['heads']}, that keep a channel of keys"),
        frame(34, 26, 576, high * len(rows)),
        heat(rows, row["heads"], (34, 26), (576 / dims, high)),
        *(_tick(34 + 576 * i / 4, bottom, str(dims * i // 4)) for i in range(5)),
        words(322, bottom + 32, "channel", "middle"),
    ]
    return svg(660, bottom + 40, f"{row['policy']}: channels of keys that are stored", parts)


def basis(row: Row) -> str:
    """Draw the spectra of all heads, and how many dimensions each head keeps."""
    parts: list[str] = []
    for i, (what, colour) in enumerate((("key", MARK), ("value", OTHER))):
        parts += _spectrum(row[what], f"{what}s", 40 + 235 * i, colour)
        parts += _ranks(row[f"{what}_ranks"], f"{what}s", 510 + 85 * i, row["dims"], colour)
    return svg(680, 246, f"{row['policy']}: singular values, and dimensions kept", parts)


def _spectrum(found: Mapping[str, str], what: str, left: float, colour: str) -> list[str]:
    """Draw the median and the middle 80 % of the heads' singular values, on a log scale."""
    low, middle, high = (numbers(found[name]) for name in ("low", "median", "high"))
    count = len(middle)

    def place(i: int, value: float) -> tuple[float, float]:
        down = -math.log10(max(value, 1e-3)) / 3
        return left + 200 * i / (count - 1), 26 + 180 * min(1.0, down)

    lines = [[place(i, value) for i, value in enumerate(each)] for each in (low, middle, high)]
    return [
        words(left, 16, f"singular values of {what}"),
        frame(left, 26, 200, 180),
        band(lines[2], lines[0], colour),
        line(lines[1], colour),
        *(words(left - 5, 30 + 60 * i, text, "end") for i, text in enumerate(_POWERS)),
        *(_tick(left + 100 * i, 206, str(max(1, count * i // 2))) for i in range(3)),
        words(left + 100, 238, "dimension", "middle"),
    ]


_POWERS: Final = ("1", ".1", ".01")


def _ranks(rows: Sequence[str], what: str, left: float, dims: int, colour: str) -> list[str]:
    """Draw how many dimensions each head of each layer keeps."""
    ranks = [numbers(each) for each in rows]
    wide, high = 60 / len(ranks[0]), 180 / len(ranks)
    return [
        words(left, 16, f"kept, {what}"),
        frame(left, 26, 60, 180),
        heat(ranks, dims, (left, 26), (wide, high), colour),
        words(left + 30, 222, _span(ranks), "middle"),
        words(left + 30, 238, "layer, head", "middle"),
    ]


def formats(rows: Sequence[Row]) -> str:
    """Draw the quantization error of keys and of values by format."""
    parts = [
        words(150, 16, "bytes", "end"),
        words(165, 16, "relative error of keys (upper bar) and values (lower bar)"),
    ]
    most = max(max(row["key_error"], row["value_error"] or 0) for row in rows)
    for i, row in enumerate(rows):
        y = 26 + 34 * i
        parts += [
            words(0, y + 20, row["codec"]),
            words(150, y + 20, f"{row['bytes']:g}", "end"),
            *_error(row["key_error"], most, y + 3, MARK),
            *_error(row["value_error"], most, y + 17, OTHER),
        ]
    return svg(660, 26 + 34 * len(rows), "Bytes and errors of the codes of formats", parts)


def mapped(rows: Sequence[Row], names: Mapping[str, str]) -> str:
    """Draw the errors of attention under formats, plain and after each of the named maps."""
    shown = [row for row in rows if row["format"] in ("k4v4", "k4v2") and row["basis"] in names]
    most = max(row["error"] for row in shown)
    parts = [words(165, 16, "relative error of attention outputs")]
    for i, row in enumerate(shown):
        y = 26 + 22 * i
        colour = MARK if row["basis"] == "plain" else OTHER
        parts += [
            words(0, y + 13, row["format"]),
            words(150, y + 13, names[row["basis"]], "end"),
            *_error(row["error"], most, y + 3, colour),
        ]
    return svg(660, 30 + 22 * len(shown), "Errors of attention by what precedes a format", parts)


def _error(error: float | None, most: float, y: float, colour: str) -> list[str]:
    if error is None:
        return []
    length = 420 * error / most
    return [box(165, y, length, 12, colour), words(171 + length, y + 10, f"{100 * error:.1f} %")]


def _layers(count: int, high: float) -> list[str]:
    """Label every tenth layer."""
    return [words(29, 26 + high * i + 8, str(i), "end") for i in range(0, count, 10)]


def _tick(x: float, bottom: float, text: str) -> str:
    return words(x, bottom + 16, text, "middle")


def _span(rows: Sequence[Sequence[float]]) -> str:
    least, most = (round(f(map(f, rows))) for f in (min, max))
    return str(least) if least == most else f"{least:,} to {most:,}"


def pictures() -> dict[Path, str]:
    """Draw all pictures."""
    drawn = {START: start()}
    rows = result("method_figures")["rows"]
    for row in rows:
        if row["kind"] in _DRAW:
            drawn[METHODS / f"{row['method']}.svg"] = _DRAW[row["kind"]](row)
    drawn[METHODS / "formats.svg"] = formats([row for row in rows if row["kind"] == "format"])
    errors = result("rotation_errors")["rows"]
    drawn[METHODS / "hadamard.svg"] = mapped(errors, ROTATIONS)
    drawn[METHODS / "channel-scale.svg"] = mapped(errors, SCALES)
    return drawn


_DRAW: Final = {"kept": kept, "basis": basis, "channels": channels}


if __name__ == "__main__":
    from kv_policy.files import write_whole

    METHODS.mkdir(parents=True, exist_ok=True)
    for path, picture in pictures().items():
        if not path.exists() or path.read_text() != picture:
            write_whole(path, picture.encode())
            print(f"wrote {path.relative_to(ROOT)}", file=sys.stderr)
