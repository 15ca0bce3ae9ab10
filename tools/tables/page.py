"""The page of benchmarks: every table on it is written from a result; the prose between stays.

The tests fail where a table is not as it would be written.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tools.tables import cpu, host, methods, peers, vllm, zack
from tools.tables.markdown import Row, Writer, renewed, said

ROOT: Final = Path(__file__).parent.parent.parent
PAGE: Final = ROOT / "docs" / "benchmarks.md"
RESULTS: Final = ROOT / "benchmarks" / "results"
WRITERS: Final[Mapping[str, Writer]] = {
    name: writer
    for module in (cpu, host, methods, peers, vllm, zack)
    for name, writer in module.WRITERS.items()
}


def result(name: str) -> Row:
    """Reads what a benchmark wrote."""
    found: Row = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def tables(page: str, name: str) -> list[str]:
    """Writes the tables of a section."""
    return list(WRITERS[name](result(name), said(page, name)))


def renew(page: str) -> str:
    """Writes all tables of a page anew."""
    for name in WRITERS:
        page = renewed(page, name, tables(page, name))
    return page
