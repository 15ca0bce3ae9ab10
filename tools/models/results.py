"""What the committed result says of each architecture, and what a later run must not lose."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent.parent
RESULT: Final = ROOT / "benchmarks" / "results" / "models.json"
KINDS: Final = ("equal", "refused", "refused late", "wrong", "unbuildable")

Row = Mapping[str, Any]


def rows() -> list[Row]:
    """Return the row of each architecture in the committed result; none before the first run."""
    if not RESULT.exists():
        return []
    found: list[Row] = json.loads(RESULT.read_text())["rows"]
    return found


def summary(found: Sequence[Row]) -> dict[str, int]:
    """Return the figures that a document may quote; variants count as part of an architecture."""
    main = [row for row in found if not row["variant"]]
    counts = Counter(row["result"] for row in main)
    hybrids = sum(row["result"] == "equal" and row["hybrid"] for row in main)
    return {
        "architectures": len(main),
        **{kind.replace(" ", "_"): counts[kind] for kind in KINDS},
        "hybrids_equal": hybrids,
    }


def named(row: Row) -> str:
    """Return an architecture with its variant."""
    return ", ".join(part for part in (row["architecture"], row["variant"]) if part)


def broken(found: Iterable[Row], before: Iterable[Row]) -> list[str]:
    """Return a sentence per architecture that is wrong, or was equal before and is not now."""
    equal = {named(row) for row in before if row["result"] == "equal"}
    return [
        f"{named(row)}: {row['result']}"
        + (", but was equal in the result" if named(row) in equal else "")
        + (f": {row['said']}" if row["said"] else "")
        for row in found
        if row["result"] == "wrong" or (row["result"] != "equal" and named(row) in equal)
    ]
