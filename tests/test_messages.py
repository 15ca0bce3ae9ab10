"""What messages advise works as it is typed: commands are read by the parser, names are there.

Looked at are the strings of the sources but for docstrings; what is put into one is a word here.
"""

import ast
import pickle
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kv_eval import extras
from kv_policy import NotCalibratedError
from tools.pages import INLINE, ROOT
from tools.parsing import reach, read_command

SOURCES = sorted(ROOT.glob("packages/*/src/**/*.py"))
INSTALLING = ROOT / "packages/kv-policy/src/kv_policy/installing.py"
# What a file is or comes from, which nobody is told to type.
NOUNS = {"compress", "eval", "eval --json", "inspect"}
SPOKEN_OF = re.compile(r" (again|writes|wrote)\b")  # behind a command that was typed before


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Every string of a file that is no docstring, with its line."""
    tree = ast.parse(path.read_text())
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part is not node
    }
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in inside | alone:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(map(_text, node.values))


def _text(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else "VALUE"


MESSAGES = [(path, line, text) for path in SOURCES for line, text in texts(path)]


def test_every_command_that_a_message_names_is_read_by_its_parser() -> None:
    found = 0
    for path, line, text in MESSAGES:
        for mention in INLINE.finditer(text):
            command = mention[1]
            words = shlex.split(command)
            where = f"{path.relative_to(ROOT)}:{line}: kv-serve {command}"
            found += 1
            if command in NOUNS or SPOKEN_OF.match(text, mention.end()):
                assert reach([word for word in words if word[0] != "-"])[1] == [], where
                continue
            try:
                read_command(words)
            except Exception as error:
                raise AssertionError(f"{where}: {error}") from error
    assert found > 10


def test_installing_is_advised_by_one_helper() -> None:
    spelled = re.compile(r"\b(uv )?pip (un)?install\b|kv-[a-z]+\[")
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path, line, text in MESSAGES
        if path != INSTALLING and spelled.search(text)
    ]
    assert not found, "use kv_policy.installing, as it names what is there"


def test_what_extras_bring_is_what_messages_advise() -> None:
    path = ROOT / "packages" / "kv-eval" / "pyproject.toml"
    offered = tomllib.loads(path.read_text())["project"]["optional-dependencies"]
    assert offered["lm-eval"] == [extras.LM_EVAL]
    assert offered["plot"] == [extras.ALTAIR]
    assert [Requirement(line).name for line in offered["cpu"]] == ["kv-cpu"]


@pytest.mark.parametrize("model", [None, "MODEL", "some folder/model"])
@pytest.mark.parametrize("calibration", ["zack", "leankv"])
def test_what_calibrates_can_be_typed(calibration: str, model: str | None) -> None:
    said = NotCalibratedError(calibration, "a file.json", calibration).advice(model)
    (command,) = re.findall(r"`kv-serve ([^`]+)`", said)
    read_command(shlex.split(command))


def test_what_is_not_calibrated_is_said_in_another_process_too() -> None:
    error = NotCalibratedError("zack", "a file", "zack")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_what_the_demo_ends_with_can_be_typed() -> None:
    commands = import_module("kv_eval.cli.demo").next_commands("kv-serve")
    assert len(commands) == 3
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "kv-serve"
        read_command(words)
