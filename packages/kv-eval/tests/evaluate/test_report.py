"""The JSON file of an evaluation, and what it says about the code that was measured."""

import json
import subprocess
from pathlib import Path

import pytest

from kv_eval.evaluate import provenance
from kv_eval.evaluate.journal import Finished, Journal
from kv_eval.evaluate.machine import EXTENSIONS, machine
from kv_eval.evaluate.plan import Plan
from kv_eval.evaluate.report import Report, rows
from kv_runtime import Serving
from kv_transformers.from_text import FULL

PLAN = Plan((FULL, "k8v4"), ("needle",), ("aware",), length=100, samples=2, seed=3)


def entry(policy: str, sample: int, score: float, kv_bytes: int, seconds: float) -> Finished:
    return Finished(
        policy=policy,
        task="needle",
        setting="aware",
        sample=sample,
        score=score,
        kv_bytes=kv_bytes,
        full_bytes=1000 + sample,
        seconds=seconds,
    )


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal.start(tmp_path / "partial", {})
    journal.append([entry(FULL, i, 1.0, 1000 + i, 1.5) for i in range(2)])
    journal.append([entry("k8v4", 0, 1.0, 400, 2.0), entry("k8v4", 1, 0.0, 407, 2.5)])
    return journal


def test_the_file_is_as_documented(journal: Journal, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("something older")
    Report(
        model="tiny",
        commit="c0ffee",
        versions={"torch": "2"},
        settings={"seed": 3, "text": "a"},
        machine={"cores": 2},
        attention=Serving("cpu", "avx2"),
        rows=rows(PLAN, journal),
    ).write(path)
    same = {"task": "needle", "setting": "aware", "length": 100, "samples": 2, "seed": 3}
    assert json.loads(path.read_text()) == {
        "model": "tiny",
        "commit": "c0ffee",
        "versions": {"torch": "2"},
        "settings": {"seed": 3, "text": "a"},
        "machine": {"cores": 2},
        "attention": {"backend": "cpu", "instructions": "avx2"},
        "rows": [
            {
                **{"policy": "full", **same, "score": 1.0, "full_score": 1.0},
                "score_interval": pytest.approx([0.34, 1.0], abs=0.005),
                **{"kv_bytes": 1000.5, "full_bytes": 1000.5, "seconds": 3.0},
            },
            {
                **{"policy": "k8v4", **same, "score": 0.5, "full_score": 1.0},
                "score_interval": pytest.approx([0.0945, 0.9055], abs=0.0001),
                "change_interval": pytest.approx([-0.8982, 0.3982], abs=0.0001),
                **{"kv_bytes": 403.5, "full_bytes": 1000.5, "seconds": 4.5},
            },
        ],
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.json", "partial"]


def test_an_older_file_stays_whole_when_writing_fails(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    path.write_text("something older")

    def full_disk(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        Report(
            model="t",
            commit="c",
            versions={},
            attention=Serving("torch"),
            rows=rows(PLAN, journal),
        ).write(path)
    assert path.read_text() == "something older"


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "commit.gpgsign=false")
    command = ("git", "-C", str(folder), *who, *arguments)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    try:
        git(tmp_path, "init", "--quiet")
    except FileNotFoundError:
        pytest.skip("git is not installed")
    (tmp_path / "code.py").write_text("a = 1\n")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return tmp_path


def test_the_commit_of_a_checkout(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    git(checkout, "tag", "-a", "v1", "-m", "a tag does not take the commit's place")
    assert provenance.commit(checkout / "code.py") == head
    (checkout / "code.py").write_text("a = 2\n")
    assert provenance.commit(checkout / "code.py") == f"{head}-dirty"


def test_the_version_where_the_code_is_not_tracked(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = checkout / "site-packages" / "code.py"  # in somebody else's repository
    installed.parent.mkdir()
    installed.write_text("")
    assert provenance.commit(installed).startswith("kv-eval 0.")
    monkeypatch.setenv("PATH", str(checkout))  # no git at all
    assert provenance.commit(checkout / "code.py").startswith("kv-eval 0.")


def test_the_machine_is_described() -> None:
    found = machine()
    assert {"system", "processor", "cores", "threads"} <= set(found)
    assert json.loads(json.dumps(found)) == found
    assert found["cores"] >= 1
    described = Path("/proc/cpuinfo")
    flags = described.read_text().split() if described.exists() else []
    named = str(found.get("instructions", "")).split()
    assert set(named) == set(flags) & set(EXTENSIONS)
