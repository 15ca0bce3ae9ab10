"""Which versions of vLLM were tested and compared is read from the reports of sessions."""

import ast
import json
import sys
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

from kv_serve.vllm.versions import NEWEST, OLDEST, is_served
from tools import upstream
from tools.served import VLLM, compared, ran
from tools.workspace import ROOT

REPORT = '<testsuites><testsuite tests="{}" failures="{}" errors="0" skipped="2"/></testsuites>'


def test_versions_are_those_of_whole_runs_in_order(tmp_path: Path) -> None:
    for name, tests, failures in (
        ("vllm-at-0.32.0", 9, 0),
        ("vllm-at-0.9.1", 8, 1),
        ("vllm-at-0.31.0-chosen", 3, 0),
        ("vllm", 7, 0),
    ):
        (tmp_path / f"{name}.xml").write_text(REPORT.format(tests, failures))
    assert ran(tmp_path) == [
        {"version": "0.9.1", "passed": 5, "failed": 1, "skipped": 2},
        {"version": "0.32.0", "passed": 7, "failed": 0, "skipped": 2},
    ]
    assert compared(tmp_path) == []


def test_a_comparison_leaves_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = tmp_path / "vllm-sources" / "vllm"
    sources.mkdir(parents=True)
    (sources / "__init__.py").write_text("")
    reports = tmp_path / "reports"
    for name in ("0.33.0", "checkout"):
        report = str(reports / f"upstream-{name}.json")
        monkeypatch.setattr(sys, "argv", ["upstream", str(sources.parent), "--report", report])
        assert upstream.main() == 1
    count = len(upstream.lines()) + len(upstream.imported())
    said = json.loads((reports / "upstream-checkout.json").read_text())
    assert said["compared"] == count
    assert f"of {count} interfaces and imported names, {said['differ']} differ" in (
        capsys.readouterr().out
    )
    assert compared(reports) == [{"version": "0.33.0", **said}]


def test_the_versions_that_are_tested_are_served_and_newest_first() -> None:
    minors = [Version(each).release[:2] for each in VLLM]
    assert minors == sorted({*minors}, reverse=True)
    assert minors[-1] == OLDEST
    assert minors[0] <= NEWEST
    assert all(map(is_served, VLLM))
    newest, *others = (f"{major}.{minor}" for major, minor in minors)
    page = (ROOT / "docs" / "serving.md").read_text()
    assert f"Every change is tested in vLLM {newest} for CPUs" in page
    listed = f"{', '.join(others[:-1])} and {others[-1]}"
    assert f"The nightly workflow runs the same tests in {listed} too" in page


def test_all_versions_are_tested_at_night() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    jobs = workflow["jobs"]
    assert "-s vllm-at " in jobs["sessions"]["steps"][-1]["run"]
    job = jobs["vllm-versions"]
    assert job["if"] == "github.event_name == 'schedule'"
    assert job["strategy"]["matrix"]["session"] == "${{ fromJSON(needs.sessions.outputs.vllm) }}"
    noxfile = ast.parse((ROOT / "noxfile.py").read_text())
    (session,) = (x for x in noxfile.body if isinstance(x, ast.FunctionDef) and x.name == "vllm_at")
    assert "parametrize('version', VLLM, ids=VLLM)" in ast.unparse(session.decorator_list[1])
