"""The command for a first GPU survives whatever fails in it, and rehearses without one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu_first.py"
# Does what its cases are named after.
FAKE = """
import json, os, sys, time
cases, into = sys.argv[sys.argv.index("--cases") + 1], sys.argv[sys.argv.index("--into") + 1]
def row(**fields):
    with open(into, "a") as file:
        file.write(json.dumps({"part": sys.argv[1], **fields}) + chr(10))
for case in cases.split("|"):
    if case == "unstarted":
        raise SystemExit("it does not start")
    row(kind="begun", case=case)
    if case == "dies":
        print("last words", flush=True)
        os._exit(7)
    if case == "hangs":
        time.sleep(1000)
    row(kind="found", case=case)
"""
without_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
Row = dict[str, Any]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that runs parts."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import _gpu_parts

    return _gpu_parts


@pytest.fixture
def run(parts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run parts of fake cases, and give all rows, and how many there were after each part."""
    monkeypatch.setattr(parts, "GRACE", 0.5)
    script = tmp_path / "fake.py"
    script.write_text(FAKE)

    def all_of(*given: Any, seconds: float = 60) -> tuple[list[Row], list[int]]:
        written: list[int] = []
        runner = parts.Runner(
            tmp_path,
            monotonic() + seconds,
            True,
            lambda rows: written.append(len(rows)),
            script=script,
        )
        runner.run(given)
        return runner.rows, written

    return all_of


def of(rows: list[Row], kind: str) -> list[object]:
    return [row.get("case") for row in rows if row["kind"] == kind]


def test_a_process_that_dies_costs_its_case_alone(
    parts: ModuleType, run: Callable[..., Any]
) -> None:
    one = parts.Part("one", 1, ("a", "dies", "b", "c"))
    rows, written = run(one, parts.Part("two", 1, ("d", "e"), together=2))
    assert of(rows, "found")[:3] == ["a", "b", "c"]
    assert sorted(map(str, of(rows, "found")[3:])) == ["d", "e"]
    (died,) = (row for row in rows if row["kind"] == "died")
    assert died["case"] == "dies"
    assert died["error"] == "exit code 7"
    assert died["traceback"] == ["last words"]
    assert len(written) == 2
    assert written[-1] == len(rows)


def test_a_process_that_hangs_is_killed_and_the_next_part_goes_on(
    parts: ModuleType, run: Callable[..., Any]
) -> None:
    one = parts.Part("one", 1, ("hangs", "a"))
    rows, _ = run(one, parts.Part("two", 40, ("b",)), seconds=60)
    assert of(rows, "died") == ["hangs"]
    assert of(rows, "left out") == ["a"]
    assert of(rows, "found") == ["b"]


def test_a_case_alone_that_hangs_leaves_time_to_the_others(
    parts: ModuleType, run: Callable[..., Any]
) -> None:
    rows, _ = run(parts.Part("one", 1, ("hangs", "a"), alone=True), seconds=8)
    assert of(rows, "died") == ["hangs"]
    assert of(rows, "found") == ["a"]


def test_a_process_that_does_not_start_is_not_started_again(
    parts: ModuleType, run: Callable[..., Any]
) -> None:
    rows, _ = run(parts.Part("one", 1, ("unstarted", "a", "b")))
    assert of(rows, "died") == ["start"]
    assert of(rows, "left out") == ["unstarted", "a", "b"]


def test_a_part_that_needs_what_is_absent_is_left_out(
    parts: ModuleType, run: Callable[..., Any]
) -> None:
    rows, _ = run(parts.Part("one", 1, ("a",), needs=("no_such_module",)))
    (row,) = (row for row in rows if row["kind"] == "left out")
    assert row["why"] == "no_such_module not installed"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that computes figures."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import _gpu_figures

    return _gpu_figures


def decode(way: str, seconds: float, shape: str = "64x16k") -> Row:
    return {
        "kind": "decode",
        "part": "decode",
        "shape": shape,
        "way": way,
        "seconds": seconds,
        "share": 0.1 / seconds,
    }


def test_speed_is_over_the_fastest_bf16_that_is_right(figures: ModuleType) -> None:
    rows = [decode("bf16", 1.0), decode("sdpa", 1.2), decode("k8v4", 0.4)]
    rival = {"kind": "rival", "part": "rivals", "shape": "64x16k", "way": "a", "seconds": 0.9}
    wrong = rival | {"way": "b", "seconds": 0.1, "ok": False}
    found = figures.figures([*rows, rival | {"ok": True}, wrong])
    assert found["k8v4_vs_bf16"] == pytest.approx(0.9 / 0.4)
    assert found["k8v4_vs_own_bf16"] == pytest.approx(1 / 0.4)
    assert found["bf16_share"] == pytest.approx(0.1)


def test_what_falls_short_and_what_is_missing_is_said(figures: ModuleType) -> None:
    said = figures.short({"bf16_share": 0.8, "k8v4_share": 0.7, "skew_over_balanced": 1.2})
    assert "k8v4_share is 0.7; asked: >= 0.75" in said
    assert "skew_over_balanced is 1.2; asked: <= 1.15" in said
    assert "manager_share was not measured; asked: <= 0.005" in said
    assert not any(line.startswith("bf16_share") for line in said)


def test_a_comparison_that_fails_counts_as_wrong(figures: ModuleType) -> None:
    rows = [
        {"kind": "right", "part": "right", "ok": True},
        {"kind": "right", "part": "right", "ok": False},
        {"kind": "died", "part": "right", "case": "a"},
        {"kind": "failed", "part": "decode", "what": "b"},
    ]
    found = figures.figures(rows)
    assert (found["cases_right"], found["cases_wrong"]) == (1, 2)


def command(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        (sys.executable, str(SCRIPT), *arguments),
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )


@without_triton
def test_without_a_gpu_a_sentence_says_so() -> None:
    done = command(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("there is no GPU that torch can use here")


REHEARSALS = {
    "right": ["right"],
    "speed": ["machine", "tune", "decode", "rivals"],
    "models": ["steps", "generate"],
}


@without_triton
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(names, id=name, marks=() if name == "right" else pytest.mark.slow)
        for name, names in REHEARSALS.items()
    ],
)
def test_a_rehearsal_runs_every_part(names: list[str], tmp_path: Path) -> None:
    done = command("--rehearse", "--minutes", "60", "--work", str(tmp_path), "--only", *names)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "gpu.json").read_text())
    ran = [row["part"] for row in result["rows"] if row["kind"] == "part"]
    assert list(dict.fromkeys(ran)) == names
    assert not [row for row in result["rows"] if row["kind"] in ("failed", "died", "left out")]
    if "right" in names:
        assert result["summary"]["cases_right"] > 10
        assert result["summary"]["cases_wrong"] == 0


@without_triton
def test_torch_and_triton_are_enough(tmp_path: Path) -> None:
    """Without any other package of this environment, those aside that these two import."""
    needed = {"torch", "triton", "torchgen", "functorch", "numpy", "numpy.libs", "sympy", "mpmath"}
    needed |= {"networkx", "jinja2", "markupsafe", "fsspec", "filelock", "typing_extensions.py"}
    folder = Path(str(distribution("torch").locate_file("")))
    for name in sorted(needed):
        if (folder / name).exists():
            (tmp_path / name).symlink_to(folder / name)
    code = """
import sys
sys.argv.append("--rehearse")
import gpu_first
import attention_cases, gate_cases, triton_cases
from kv_policy import parse
from _gpu_right_pages import POLICIES
print(*(parse(each) for each in POLICIES))
assert all(not getattr(sys.modules[x], "__file__", None) for x in ("jaxtyping", "msgspec"))
"""
    path = f"{tmp_path}{os.pathsep}{SCRIPT.parent}"
    done = subprocess.run(
        (sys.executable, "-S", "-c", code),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    assert "kv-compress:rate=4+k8v4 leankv" in done.stdout
