"""The benchmarks page: its tables are generated from results, the prose in between is not.

A test fails if a table is out of date.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tools.tables import cpu, cpu_peers, host, layout, methods, peers, vllm, zack
from tools.tables.markdown import Row, Writer, renewed, said

ROOT: Final = Path(__file__).parent.parent.parent
PAGE: Final = ROOT / "docs" / "benchmarks.md"
RESULTS: Final = ROOT / "benchmarks" / "results"
WRITERS: Final[Mapping[str, Writer]] = {
    name: writer
    for module in (cpu, cpu_peers, host, layout, methods, peers, vllm, zack)
    for name, writer in module.WRITERS.items()
}


def result(name: str) -> Row:
    """Load a benchmark's result."""
    found: Row = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def tables(page: str, name: str) -> list[str]:
    """Write the tables of a section."""
    return list(WRITERS[name](result(name), said(page, name)))


def renew(page: str) -> str:
    """Update all tables of a page."""
    for name in sorted(path.stem for path in RESULTS.glob("*.json")):
        page = renewed(page, name, tables(page, name))
    return page
