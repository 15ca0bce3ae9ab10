"""Every table on the page of benchmarks is the one that its result gives."""

import copy
import re

import pytest
import yaml

from kv_policy import parse
from tools.tables import summary
from tools.tables.markdown import figures, number, renewed, said, shown
from tools.tables.page import PAGES, RESULTS, ROOT, WRITERS, page_of, path_of, renew, result, tables

# What no machine has measured yet.
UNMEASURED = {"gpu"}
NAMES = sorted(path.stem for path in RESULTS.glob("*.json"))
SMALL = "# Page\n\n| a |\n|---|\n| 1 |\n\nprose\n\n| b |\n|---|\n| 2 |\n"

each = pytest.mark.parametrize("name", NAMES)


@each
def test_a_page_shows_the_tables_of_its_result(name: str) -> None:
    assert result(name)["name"] == name
    assert shown(page_of(name)) == tables(name), "run python -m tools.tables"


@each
def test_a_result_of_other_numbers_gives_other_tables(name: str) -> None:
    other = copy.deepcopy(result(name))
    other["summary"].update({key: value + 1 for key, value in other["summary"].items()})
    for row in other["rows"]:
        if row.get("kind") == "choice":  # of which the figures of peers are written
            row["ours"] += 1
        for cell in ("kl", "mean"):  # of which tables without figures are written
            if cell in row:
                row[cell] += 1
    page = page_of(name)
    assert shown(page)[0] != next(WRITERS[name](other, said(page)))


def test_every_result_has_a_writer_and_every_page_a_result() -> None:
    assert {*WRITERS} - {*NAMES} <= UNMEASURED
    assert {*NAMES} <= {*WRITERS}
    assert sorted(PAGES.glob("*")) == sorted(map(path_of, NAMES))
    with pytest.raises(ValueError, match=r"no_such\.json has no page; write docs/"):
        page_of("no_such")


def test_a_page_has_a_title_in_words() -> None:
    titles = [summary.title(name) for name in NAMES]
    assert len({*titles}) == len(titles)
    assert not any("_" in title for title in titles)


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


def test_a_table_of_engines_has_the_rows_of_each_kind() -> None:
    same = {"policy": "k8v4", "tokens": 1200, "identical": 1199}
    rows = [
        {"kind": "drafts", **same, "drafted": 90, "accepted": 60},
        {"kind": "offload", **same, "policy": "bf16", "cached": 5, "restored": 4}
        | {"tokens_per_gib": 1024.4},
        {"kind": "reading", "policy": "streaming", "tokens": 4096, "budget": 64, "chunk": 128}
        | {"block_tokens": 16, "blocks": 6, "held": 512},
        {"kind": "version", "version": "0.32.0", "passed": 7, "failed": 0, "skipped": 1},
        {"kind": "upstream", "version": "0.33.0", "compared": 9, "differ": 0},
    ]
    result = {"name": "engine", "summary": {"vllm_versions": 1}, "rows": rows}
    _, *tables = WRITERS["engine"](result, {"vllm_versions": "versions"})
    assert [table.splitlines()[2:] for table in tables] == [
        ["| `k8v4` | 1,200 | 1,199 | 90 | 60 |"],
        ["| stock, `bf16` | 1,200 | 1,199 | 5 | 4 | 1,024 |"],
        ["| `streaming` | 4,096 | 64 | 128 | 96 | 512 |"],
        ["| 0.32.0 | 7 | 0 | 1 |  |  |", "| 0.33.0 |  |  |  | 9 | 0 |"],
    ]


def test_the_summary_is_that_of_the_results_and_lists_every_page() -> None:
    for path in (summary.PAGE, *summary.FIRST):
        text = path.read_text()
        assert "<!-- end of " in text
        assert summary.written(text) == text, "run python -m tools.tables"
    assert parse(summary.KEPT) == parse(summary.SOME)
    assert sorted(name for names in summary.GROUPS.values() for name in names) == NAMES
    assert len(summary.LINES) == 10


def test_the_summary_names_the_policy_that_is_compared_with_the_fastest_peer() -> None:
    (line,) = (line for line in summary.LINES if line.name == "cpu_peers")
    rows = result(line.name)["rows"]
    compared = [row for row in rows if row.get("figure") == line.figure and row["known"]]
    assert min(compared, key=lambda row: row["cost"])["ours"].partition(" ")[2] == line.policy


def test_the_navigation_has_every_page_in_the_same_order() -> None:
    text = re.sub(r"!!\S+", "", (ROOT / "mkdocs.yml").read_text())
    (found,) = (each["Benchmarks"] for each in yaml.safe_load(text)["nav"] if "Benchmarks" in each)
    first, *groups = found
    assert first == summary.PAGE.name
    listed = {
        group: [place for each in pages for place in each.values()]
        for one in groups
        for group, pages in one.items()
    }
    assert listed == {
        group: [str(path_of(name).relative_to(summary.PAGE.parent)) for name in names]
        for group, names in summary.GROUPS.items()
    }


@each
def test_writing_again_changes_nothing(name: str) -> None:
    assert renew(name) == page_of(name)


def test_tables_are_renewed_and_prose_stays() -> None:
    assert renewed(SMALL, "one", ["| x |", "| y |"]) == "# Page\n\n| x |\n\nprose\n\n| y |\n"


def test_a_table_that_nobody_writes_is_noticed() -> None:
    with pytest.raises(ValueError, match="one has 2 tables on its page, but 1 are written"):
        renewed(SMALL, "one", ["| x |"])


def test_a_figure_that_the_page_does_not_explain_is_noticed() -> None:
    with pytest.raises(ValueError, match=r"describe b of name"):
        figures({"name": "name", "summary": {"a": 1.0, "b": 2.0}}, {"a": "what it is"})


def test_a_figure_that_is_gone_leaves_the_page() -> None:
    written = figures({"name": "name", "summary": {"a": 1.5}}, {"a": "it", "b": "gone"})
    assert written.splitlines()[2:] == ["| it <!-- a --> | 1.5000 |"]
    assert said(f"{written}\n") == {"a": "it"}


def test_a_whole_number_has_no_decimals() -> None:
    assert [number(each) for each in (3600.0, 1, -0.00312)] == ["3,600", "1", "-0.0031"]


def test_vllms_scores_of_prompts_are_not_shown_as_losses_of_eviction() -> None:
    assert any(name.startswith("nll_") for name in result("vllm_quality")["summary"])
    assert "nll_" not in page_of("vllm_quality")
