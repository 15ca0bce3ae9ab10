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
SET_UP = "python -m pip install nox uv"


def commands() -> list[list[str]]:
    """Every command of the page's shell blocks, in order, without those that only set up."""
    lines = [line for b in blocks(README) if b.language == "bash" for line in b.text.splitlines()]
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


def test_clone_demo_tests_and_serve() -> None:
    found = commands()
    assert [words[:4] for words in found[:5]] == [
        ["git", "clone", "REPOSITORY", "kv-cache"],
        ["cd", "kv-cache"],
        ["python", "-m", "nox", "-s"],
        ["python", "-m", "nox", "-s"],
        ["python", "-m", "nox", "-s"],
    ]
    named = [words[4] for words in found[2:5]]
    assert named == ["demo", "tests", "serve"]
    assert {*named} <= {*sessions()}


def test_the_other_commands_are_those_of_kv_serve() -> None:
    found = commands()[5:]
    assert {words[0] for words in found} == {"kv-serve"}
    assert {words[1] for words in found} <= {*ORDER, *PACKAGES}


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

    (serve,) = (words for words in commands() if "serve" in words)
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
