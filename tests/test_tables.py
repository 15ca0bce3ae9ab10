"""Every table on the page of benchmarks is the one that its result gives."""

import copy
import re

import pytest

from tools.tables.markdown import figures, renewed, said, section, shown
from tools.tables.page import PAGE, RESULTS, WRITERS, renew, result, tables

TEXT = PAGE.read_text()
UNMEASURED = {"gpu", "ruler"}  # what no machine has measured yet
NAMES = sorted(path.stem for path in RESULTS.glob("*.json"))
ONE = "\n| a |\n|---|\n| 1 |\n\nprose\n\n| b |\n|---|\n| 2 |\n\n"
SMALL = f"# Page\n\n## one\n{ONE}## two\n\n| c |\n"

each = pytest.mark.parametrize("name", NAMES)


@each
def test_a_section_shows_the_tables_of_its_result(name: str) -> None:
    assert result(name)["name"] == name
    assert shown(TEXT, name) == tables(TEXT, name), "run python -m tools.tables"


@each
def test_a_result_of_other_numbers_gives_other_tables(name: str) -> None:
    other = copy.deepcopy(result(name))
    other["summary"].update({key: value + 1 for key, value in other["summary"].items()})
    for row in other["rows"]:
        if row.get("kind") == "choice":  # of which the figures of peers are written
            row["ours"] += 1
    assert shown(TEXT, name)[0] != next(WRITERS[name](other, said(TEXT, name)))


def test_every_result_has_a_writer_and_every_section_a_result() -> None:
    assert {*WRITERS} - {*NAMES} <= UNMEASURED
    assert {*NAMES} <= {*WRITERS}
    assert re.findall(r"^## (\w+)$", TEXT, re.MULTILINE) == NAMES


def test_a_table_of_ruler_has_every_task_and_policy() -> None:
    cell = {"samples": 2, "mean": 0.5, "interval": [0.25, 0.75], "change": None, "bytes": 1.0}
    ways = [{"policy": "full"}, {"policy": "k8v4", "change": [-0.5, 0.25], "bytes": 0.39}]
    rows: list[dict[str, object]] = [
        {**cell, "tokens": 1.0, **way, "kind": kind, "task": task}
        for kind, tasks in (("cell", ("vt", "qa_1")), ("mean", ("ruler",)))
        for task in tasks
        for way in ways
    ]
    result = {"name": "ruler", "summary": {"mean_k8v4": 0.5}, "rows": [{"kind": "about"}, *rows]}
    _, means, scores = WRITERS["ruler"](result, {"mean_k8v4": "the mean"})
    assert means.splitlines()[2:] == [
        "| the full cache | 0.500 (0.250 to 0.750) |  | 1.000 | 1.000 |",
        "| `k8v4` | 0.500 (0.250 to 0.750) | -0.500 to +0.250 | 0.390 | 1.000 |",
    ]
    assert scores.splitlines()[0] == "| task | the full cache | `k8v4` |"
    assert scores.splitlines()[3] == "| `qa_1` | 0.50 (0.25 to 0.75) | 0.50 (0.25 to 0.75) |"


def test_writing_again_changes_nothing() -> None:
    assert renew(TEXT) == TEXT


def test_tables_of_one_section_are_renewed_and_prose_stays() -> None:
    fresh = renewed(SMALL, "one", ["| x |", "| y |"])
    assert section(fresh, "one") == "\n| x |\n\nprose\n\n| y |\n\n"
    assert section(fresh, "two") == section(SMALL, "two")


def test_a_table_that_nobody_writes_is_noticed() -> None:
    with pytest.raises(ValueError, match="one has 2 tables on the page, but 1 are written"):
        renewed(SMALL, "one", ["| x |"])


def test_a_figure_that_the_page_does_not_explain_is_noticed() -> None:
    with pytest.raises(ValueError, match=r"describe b of name"):
        figures({"name": "name", "summary": {"a": 1.0, "b": 2.0}}, {"a": "what it is"})


def test_a_figure_that_is_gone_leaves_the_page() -> None:
    written = figures({"name": "name", "summary": {"a": 1.0}}, {"a": "it", "b": "gone"})
    assert written.splitlines()[2:] == ["| `a` | it | 1.0000 |"]
