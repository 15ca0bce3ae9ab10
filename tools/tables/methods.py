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


ASKED: Final = (
    ("needle", "agnostic", "needle"),
    ("multikey", "agnostic", "multikey"),
    ("nll", "agnostic", "nats"),
    ("needle", "aware", "needle, question inside"),
    ("multikey", "aware", "multikey, inside"),
    ("needle-long", "agnostic", "needle, 4,000 tokens"),
    ("variable-tracking", "agnostic", "tracking"),
    ("agreement", "agnostic", "agreement"),
)


def gate(result: Row, said: Said) -> Iterator[str]:
    """Yield the figures, all policies, the overlap with KVzip by text, and the prefill times."""
    yield markdown.figures(result, said)
    cells = [row for row in result["rows"] if row["kind"] == "cell"]
    there = [ask for ask in ASKED if any((c["task"], c["setting"]) == ask[:2] for c in cells)]
    policies = dict.fromkeys(cell["policy"] for cell in cells)
    yield table(
        ("policy", "bytes", *(title for *_, title in there)),
        (gate_line(policy, there, cells) for policy in policies),
    )
    shares = ("overlap_0.5", "overlap_0.25", "overlap_0.125")
    yield table(
        ("text", "windows", "half", "a quarter", "an eighth"),
        (
            (row["text"], f"{row['windows']}", *(f"{row[share]:.3f}" for share in shares))
            for row in result["rows"]
            if row["kind"] == "overlap"
        ),
    )
    yield table(
        ("prefill under", "over `k8v4`, quartiles of the rounds"),
        (
            (f"`{row['policy']}`", " ".join(f"{each:.3f}" for each in row["ratio"]))
            for row in result["rows"]
            if row["kind"] == "prefill" and row["policy"] != "k8v4"
        ),
    )


def gate_line(policy: str, asked: Iterable[tuple[str, ...]], cells: Iterable[Row]) -> list[str]:
    """Write what a policy held and its mean in each cell, with the interval of the mean."""
    mine = [cell for cell in cells if cell["policy"] == policy]
    found = {(cell["task"], cell["setting"]): cell for cell in reversed(mine)}  # the first part's
    line = [policy_of(mine[0]), f"{mine[0]['bytes']:.3f}"]
    for task, setting, _ in asked:
        cell = found.get((task, setting))
        digits = 3 if task in ("nll", "agreement") else 2
        line.append("" if cell is None else scored(cell, digits))
    return line


def scored(cell: Row, digits: int) -> str:
    """Write a mean with its interval."""
    low, high = (f"{each:.{digits}f}" for each in cell["interval"])
    return f"{cell['mean']:.{digits}f} ({low} to {high})"


def ruler(result: Row, said: Said) -> Iterator[str]:
    """Yield the figures, the means over all tasks, and the scores of every task."""
    yield markdown.figures(result, said)
    means = [row for row in result["rows"] if row["kind"] == "mean"]
    yield table(
        ("policy", "mean over the tasks", "change from the full cache", "bytes", "tokens"),
        (
            (
                policy_of(row),
                scored(row, 3),
                ""
                if row["change"] is None
                else " to ".join(f"{end:+.3f}" for end in row["change"]),
                f"{row['bytes']:.3f}",
                f"{row['tokens']:.3f}",
            )
            for row in means
        ),
    )
    cells = [row for row in result["rows"] if row["kind"] == "cell"]
    found = {(row["task"], row["policy"]): row for row in cells}
    yield table(
        ("task", *map(policy_of, means)),
        (
            (f"`{task}`", *(scored(found[task, row["policy"]], 2) for row in means))
            for task in dict.fromkeys(row["task"] for row in cells)
        ),
    )


LATER: Final = (
    ("needle", "agnostic", "needle"),
    ("needle", "aware", "needle, question inside"),
    ("nll", "agnostic", "nats per token"),
)


def methods(result: Row, said: Said) -> Iterator[str]:
    """Yield what each policy holds and its three cells, at usual settings and near a quarter."""
    cells = result["rows"]
    names = dict.fromkeys(cell["name"] for cell in cells)
    for quarter in (False, True):
        here = [name for name in names if name == "full" or name.endswith("_25") is quarter]
        of_name = {name: [cell for cell in cells if cell["name"] == name] for name in here}
        yield table(
            ("policy", "bytes", *(title for *_, title in LATER)),
            (gate_line(mine[0]["policy"], LATER, mine) for mine in of_name.values()),
        )


def levels(result: Row, said: Said) -> Iterator[str]:
    """Yield what each format holds and its three cells."""
    cells = result["rows"]
    of_name = {cell["name"]: [c for c in cells if c["name"] == cell["name"]] for cell in cells}
    yield table(
        ("format", "bytes", *(title for *_, title in LATER)),
        (gate_line(mine[0]["policy"], LATER, mine) for mine in of_name.values()),
    )


def quest_quality(result: Row, said: Said) -> Iterator[str]:
    """Yield what each policy holds, and its two cells with the question after the prompt."""
    cells = result["rows"]
    of_name = {cell["name"]: [c for c in cells if c["name"] == cell["name"]] for cell in cells}
    asked = [each for each in LATER if each[1] == "agnostic"]
    yield table(
        ("policy", "bytes", *(title for *_, title in asked)),
        (gate_line(mine[0]["policy"], asked, mine) for mine in of_name.values()),
    )


def recommend(result: Row, said: Said) -> Iterator[str]:
    """Yield the figures, and for each budget where the search ends and what is best."""
    yield markdown.figures(result, said)
    yield table(
        (
            *("bytes, at most", "policies that fit", "found", "nats added", "best", "nats added"),
            *("found over best", "95 %", "windows read, of all"),
        ),
        (
            (
                f"{row['budget']:.1%}",
                f"{row['policies']}",
                f"`{row['found']}`",
                f"{row['loss']:+.4f}",
                f"`{row['best']}`",
                f"{row['best_loss']:+.4f}",
                f"{row['gap']:+.4f}",
                " to ".join(f"{end:+.4f}" for end in row["gap_interval"]),
                f"{row['spent']:.3f}",
            )
            for row in result["rows"]
            if row["kind"] == "budget"
        ),
    )


def policy_of(row: Row) -> str:
    """Write the policy of a row."""
    return "the full cache" if row["policy"] == "full" else f"`{row['policy']}`"


def rotation(result: Row, said: Said) -> Iterator[str]:
    """Yield the figures, and the rise of each variant with its interval."""
    yield markdown.figures(result, said)
    lines = (
        (
            f"`{row['format']}`",
            f"`{row['policy']}`",
            f"{row['rise']:.4f}",
            f"{row['interval'][0]:.4f} to {row['interval'][1]:.4f}",
            f"{row['vector_bytes']:,}",
        )
        for row in result["rows"]
        if row["kind"] == "rise"
    )
    yield table(("format", "policy", "nats over `raw`", "interval", "bytes of vectors"), lines)


WRITERS: Final = {
    "methods": methods,
    "levels": levels,
    "levels_fitted": levels,
    "quest_quality": quest_quality,
    "recommend": recommend,
    "ruler": ruler,
    "rotation": rotation,
    "rotation_errors": only_figures,
    "gate": gate,
    "kv_compress_quality": kv_compress_quality,
    "leankv_quality": leankv_quality,
    "method_figures": only_figures,
    "models": only_figures,
}
