"""The benchmarks import what the packages have, and time steps without an effect of the order."""

import ast
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tools.tables.layout import quartiles

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(ROOT.glob("benchmarks/*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_benchmark_imports_of_ours_exists(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("kv_"):
            continue
        try:
            module = import_module(node.module)
        except ModuleNotFoundError as error:
            if str(error.name).startswith("kv_"):
                raise
            continue  # triton and vllm, where they are not installed
        for name in node.names:
            found = hasattr(module, name.name) or find_spec(f"{node.module}.{name.name}")
            assert found, f"{node.module} has no {name.name}"


@pytest.fixture
def layout(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark of decode steps before and after a change."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return import_module("layout")


class Fake:
    """A process whose steps take a set time, and more if another one was started before it."""

    def __init__(self, started: list["Fake"], seconds: float, late: float = 1.0) -> None:
        """Start it: `late` is the factor of a process started second."""
        self.running, self.policy = True, ""
        self.seconds = seconds * (late if any(each.running for each in started) else 1.0)
        started.append(self)

    def ask(self, line: str = "") -> float:
        """Start a cache for a policy, or give the seconds of a step."""
        self.policy = line or self.policy
        assert self.policy == "k8v4"
        return self.seconds

    def end(self) -> None:
        """End it."""
        self.running = False


def test_a_process_that_is_slower_as_the_second_one_changes_no_ratio(layout: ModuleType) -> None:
    started: list[Fake] = []
    base, other = (partial(Fake, started, each, 1.21) for each in (0.010, 0.011))
    row = layout.in_turn(base, other, "k8v4", 5)
    assert row["orders"] == pytest.approx([1.1 * 1.21, 1.1 / 1.21])
    assert row["ratio"] == pytest.approx(1.1)
    assert row["quartiles"] == pytest.approx([1.1, 1.1])
    assert row["ms"] == pytest.approx(1.1 * row["base_ms"])
    assert len(started) == 4
    assert not any(each.running for each in started)


def test_processes_end_when_one_does_not_start(layout: ModuleType) -> None:
    started: list[Fake] = []

    def fails() -> Fake:
        raise OSError("no such Python")

    with pytest.raises(OSError, match="no such Python"):
        layout.in_turn(partial(Fake, started, 1.0), fails, "k8v4", 5)
    assert [each.running for each in started] == [False]


def test_every_timed_row_has_both_orders(
    layout: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def in_turn(
        base: Callable[[], Any], other: Callable[[], Any], policy: str, rounds: int
    ) -> dict[str, object]:
        asked.append((*base(), *other(), policy, rounds))
        return {
            "policy": policy,
            "ms": 2.0,
            "base_ms": 1.0,
            "ratio": 2.0,
            "quartiles": [1.5, 2.5],
            "orders": [2.25, 1.75],
        }

    def worker(
        python: str, *, tokens: int, change: str = "", isa: str | None = None
    ) -> tuple[str, str, int, str | None]:
        return python, change, tokens, isa

    monkeypatch.setattr(layout, "in_turn", in_turn)
    monkeypatch.setattr(layout, "Worker", worker)
    decode = [*layout.timed("old", 3, 256, "avx2")]
    for policy in layout.POLICIES:
        new = sys.executable
        assert ("old", "", 256, "avx2", new, "", 256, "avx2", policy, 3) in asked
    assert {row["policy"] for row in decode} == {*layout.POLICIES}
    variants = [*layout.variants(3, 256)]
    assert {row["variant"] for row in variants} == {*layout.VARIANTS}
    changes = {row[5] for row in asked[len(decode) :]}
    assert changes == {*layout.VARIANTS.values()}
    wanted = "2.000 (1.500 to 2.500), by order 2.250 and 1.750"
    assert {quartiles(row, "new_over_old") for row in decode} == {wanted}
    assert {quartiles(row, "ratio") for row in variants} == {wanted}
