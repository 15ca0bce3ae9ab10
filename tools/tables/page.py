"""The pages of benchmarks, one for each result: tables are generated, the prose is not.

A test fails if a table is out of date.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tools.tables import cpu, cpu_peers, host, layout, methods, peers, vllm, zack
from tools.tables.markdown import Row, Writer, renewed, said

ROOT: Final = Path(__file__).parent.parent.parent
PAGES: Final = ROOT / "docs" / "benchmarks"
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


def measured() -> list[str]:
    """Return the names of all results."""
    return sorted(path.stem for path in RESULTS.glob("*.json"))


def path_of(name: str) -> Path:
    """Return the page of a result: `docs/benchmarks/vllm-capacity.md` of `vllm_capacity`."""
    return PAGES / f"{name.replace('_', '-')}.md"


def page_of(name: str) -> str:
    """Return the text of a result's page.

    Raises:
        ValueError: the result has no page.
    """
    path = path_of(name)
    if not path.is_file():
        raise ValueError(f"{name}.json has no page; write {path.relative_to(ROOT)}")
    return path.read_text()


def tables(name: str) -> list[str]:
    """Write the tables of a result, with the descriptions of its page."""
    return list(WRITERS[name](result(name), said(page_of(name))))


def renew(name: str) -> str:
    """Return a result's page with its tables updated."""
    return renewed(page_of(name), name, tables(name))
