"""The figures in the documentation are those that a benchmark wrote, digit for digit."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
FIGURE = re.compile(r"^\| `(\w+)` \|.*\| (-?[\d.]+) \|$", re.MULTILINE)


def shown(name: str, page: str) -> dict[str, str]:
    """The figures of one benchmark, by name, as the page writes them."""
    _, _, rest = page.partition(f"\n## {name}\n")
    return dict(FIGURE.findall(rest.partition("\n## ")[0]))


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_every_figure_of_a_result_is_on_the_page_as_it_was_written(path: Path) -> None:
    result = json.loads(path.read_text())
    assert result["name"] == path.stem
    want = {name: f"{value:.4f}" for name, value in result["summary"].items()}
    assert shown(path.stem, PAGE.read_text()) == want


def test_no_section_is_without_a_result() -> None:
    sections = re.findall(r"^## (\w+)$", PAGE.read_text(), re.MULTILINE)
    assert sections == [path.stem for path in RESULTS]


def test_a_figure_that_was_edited_is_noticed() -> None:
    page = "\n## one\n\n| `a` | what it is | 0.4063 |\n\n## two\n\n| `a` | other | 1.0000 |\n"
    assert shown("one", page) == {"a": "0.4063"}
    assert shown("two", page) == {"a": "1.0000"}
