"""Tables of the layout of the code, and of decode steps before and after a change of it."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from tools.tables import markdown
from tools.tables.markdown import Row, Said, table

CHECKOUTS: Final = ("before", "after")
COUNTS: Final = ("files", "lines", "longest_chain")
VARIANTS: Final = {
    "same": "no change",
    "rank_groups": "tiers of one rank group",
    "paged_window": "recent window in pages",
}


def counts(rows: Sequence[Row]) -> str:
    """Write files, lines and the longest import chain of each package, before and after."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if "checkout" in row:
            found.setdefault(row.get("package", "all"), {})[row["checkout"]] = row
    names = sorted(found, key=lambda name: (name == "all", name))
    lines = (
        (
            name,
            *(
                f"{found[name][checkout][count]:,}" if checkout in found[name] else "-"
                for count in COUNTS
                for checkout in CHECKOUTS
            ),
        )
        for name in names
    )
    heads = ("files", "lines", "longest chain of imports")
    columns = (f"{head}, {checkout}" for head in heads for checkout in CHECKOUTS)
    return table(("package", *columns), lines)


def quartiles(row: Row, ratio: str) -> str:
    """Write a median ratio, its quartiles, and the ratio of each order of starting."""
    low, high = row["quartiles"]
    written = f"{row[ratio]:.3f} ({low:.3f} to {high:.3f})"
    if "orders" not in row:  # a result from before both orders were measured
        return written
    first, second = row["orders"]
    return f"{written}, by order {first:.3f} and {second:.3f}"


def steps(rows: Sequence[Row], ratio: str) -> Iterator[tuple[Any, ...]]:
    """Yield the policy of each row, and its ratio with quartiles."""
    for row in rows:
        yield f"`{row['policy']}`", quartiles(row, ratio)


def layout(result: Row, said: Said) -> Iterator[str]:
    """Yield the figures, the counts, the decode steps and the variants."""
    yield markdown.figures(result, said)
    rows = result["rows"]
    yield counts(rows)
    decode = [row for row in rows if row["kind"] == "decode"]
    yield table(("policy", "decode step, after over before"), steps(decode, "new_over_old"))
    variants = [row for row in rows if row["kind"] == "variant"]
    lines = (
        (VARIANTS[row["variant"]], *line)
        for row, line in zip(variants, steps(variants, "ratio"), strict=True)
    )
    yield table(("variant", "policy", "decode step over that of the code as it is"), lines)


WRITERS: Final = {"layout": layout}
