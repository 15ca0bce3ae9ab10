"""Tables that compare methods: what they keep, and the quality they cost."""

from collections.abc import Iterable, Iterator
from typing import Final

from tools.tables import markdown
from tools.tables.markdown import Row, Said, only_figures, table

CELLS: Final = ("needle_aware", "needle_agnostic", "multikey_aware", "multikey_agnostic")
COMPRESSED: Final = (
    "policy",
    "needle aware",
    "later",
    "multikey aware",
    "later",
    "nats",
    "average",
    "bytes",
)
QUANTIZED: Final = ("policy", "needle", "multikey", "nats per token", "bytes", "neutral", "5 %")


def by_average(rows: Iterable[Row]) -> list[Row]:
    """Sort by average, best first."""
    return sorted(rows, key=lambda row: -row["average"])


def named(row: Row) -> str:
    """Return a policy's text with its budget, even if that is the default."""
    if row["kind"] == "full":
        return "the full cache"
    name, _, options = row["policy"].partition(":")
    if row["budget"] is None or "budget=" in options:
        return f"`{row['policy']}`"
    return f"`{name}:budget={row['budget']}{',' if options else ''}{options}`"


def compressed(row: Row) -> tuple[str, ...]:
    """Write the five cells of a policy, their average, and what it held."""
    scores = [f"{row[cell]:.2f}" for cell in CELLS]
    numbers = [f"{row[key]:.3f}" for key in ("nll_agnostic", "average", "bytes")]
    return (named(row), *scores, *numbers)


def kv_compress_quality(result: Row, said: Said) -> Iterator[str]:
    """Yield the figures, all policies of each budget, and those without a budget."""
    rows = [row for row in result["rows"] if "average" in row]
    yield markdown.figures(result, said)
    for budget in sorted({row["budget"] for row in rows} - {None}):
        here = by_average(row for row in rows if row["budget"] == budget)
        yield table(COMPRESSED, (compressed(row) for row in here))
    others = by_average(row for row in rows if row["budget"] is None)
    yield table(COMPRESSED, (compressed(row) for row in others))


def quantized(row: Row) -> tuple[str, ...]:
    """Write the scores of a policy, its bytes, and whether it is as good as the full cache."""
    scores = [f"{row[task]:.1f}" for task in ("needle", "multikey")]
    numbers = [f"{row[key]:.3f}" for key in ("nll", "bytes")]
    verdicts = ["yes" if row[key] else "" for key in ("neutral", "loss5")]
    return (f"`{row['policy']}`", *scores, *numbers, *verdicts)


def leankv_quality(result: Row, said: Said) -> Iterator[str]:
    """Yield the figures, and all policies in the order of the benchmark."""
    yield markdown.figures(result, said)
    policies = [row for row in result["rows"] if row["kind"] == "policy"]
    yield table(QUANTIZED, (quantized(row) for row in policies))


WRITERS: Final = {
    "kv_compress_quality": kv_compress_quality,
    "leankv_quality": leankv_quality,
    "method_figures": only_figures,
}
