"""Results of benchmarks and counts of tests are written as documents and CI read them."""

import importlib
import json
import math
import subprocess
from pathlib import Path

import pytest

from benchmarks import _result
from tools.count import count, minutes
from tools.workspace import ROOT

REPORT = """<testsuites><testsuite tests="7" failures="1" errors="1" skipped="2" time="90">
<testcase name="a"/></testsuite></testsuites>"""


def test_a_quick_run_writes_nothing(tmp_path: Path) -> None:
    written = _result.write("name", {"figure": 1.0}, [], quick=True, folder=tmp_path / "results")
    assert written is None
    assert not list(tmp_path.iterdir())


def test_a_result_says_what_was_measured_where_and_on_what(tmp_path: Path) -> None:
    rows = [{"policy": "raw", "score": 0.5}]
    path = _result.write("name", {"figure": 0.5}, rows, quick=False, folder=tmp_path / "results")
    assert path == tmp_path / "results" / "name.json"
    result = json.loads(path.read_text())
    assert list(result) == ["name", "commit", "machine", "versions", "summary", "rows"]
    assert result["summary"] == {"figure": 0.5}
    assert result["rows"] == rows
    assert len(result["commit"].removesuffix("-dirty")) == 40
    assert {"cores", "memory_gib", "processor", "threads"} <= result["machine"].keys()
    assert {"kv-policy", "python", "torch"} <= result["versions"].keys()


def test_a_result_that_was_written_before_makes_no_commit_dirty(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        author = ("-c", "user.name=A", "-c", "user.email=a@b.c")
        subprocess.run(("git", "-C", str(tmp_path), *author, *arguments), check=True)

    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    ours, other = results / "ours.json", results / "other.json"
    for path in (ours, other):
        path.write_text("before")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message=all")
    clean = _result.commit(tmp_path)
    assert len(clean) == 40
    ours.write_text("now")
    assert _result.commit(tmp_path, replaced="ours") == clean
    assert _result.commit(tmp_path) == f"{clean}-dirty"
    other.write_text("now")
    assert _result.commit(tmp_path, replaced="ours") == f"{clean}-dirty"


def test_a_figure_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        _result.write("name", {"figure": math.nan}, [], quick=False, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_rows_that_time_is_left_for_are_measured_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    rows_of = importlib.import_module("_vllm_process").Rows
    monkeypatch.setattr(importlib.import_module("_result"), "RESULTS", tmp_path)
    rows = rows_of("name", {}, quick=False, minutes=60)
    rows.measured({"way": "a"}, lambda: {"score": 1})
    late = rows_of("name", {}, quick=False, minutes=0)
    assert late.measured({"way": "a"}, lambda: {"score": 2}) == {"way": "a", "score": 1}
    with pytest.raises(SystemExit):
        late.measured({"way": "b"}, lambda: {"score": 3})
    on = rows_of("name", {}, quick=False)
    on.measured({"way": "b"}, lambda: {"score": 4})
    assert on.rows == [{"way": "a", "score": 1}, {"way": "b", "score": 4}]


def test_errors_count_as_failures_and_reports_add_up(tmp_path: Path) -> None:
    for name in ("one.xml", "two.xml"):
        (tmp_path / name).write_text(REPORT)
    assert count(tmp_path) == (6, 4, 4)


def test_the_longest_report_comes_first(tmp_path: Path) -> None:
    for name, times in (("short.xml", 1), ("long.xml", 2)):
        (tmp_path / name).write_text("<all>" + times * REPORT + "</all>")
    assert list(minutes(tmp_path).items()) == [("long", 3.0), ("short", 1.5)]
