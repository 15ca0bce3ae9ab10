"""A distribution of somebody else's, built, installed, and found by the name of its policy."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "kv-vnorm"
CODE = """
import sys
from kv_policy import installed, load, parse
from kv_policy.testing import check_policy

entry = installed()["vnorm"]
part = load("vnorm")
print(sys.modules[part.__module__].__file__)
print(entry.value, entry.dist.name)
policy = parse("vnorm:budget=64+raw")
check_policy(policy)
print(policy)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Give a copy of the example, outside the workspace, as a third party has it."""
    copy = tmp_path / "source"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__", "dist"))
    return copy


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_policy_of_another_distribution_is_found(source: Path, tmp_path: Path) -> None:
    uv = shutil.which("uv")
    assert uv is not None, "this test builds with uv; put it on the path"
    wheels, target = tmp_path / "wheels", tmp_path / "target"
    run(uv, "build", "--quiet", "--wheel", str(source), "-o", str(wheels))
    (wheel,) = wheels.glob("kv_vnorm-*.whl")
    install = (uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--no-config")
    run(*install, "--python", sys.executable, "--target", str(target), str(wheel))
    file, entry, policy = run(sys.executable, "-c", CODE, PYTHONPATH=str(target)).splitlines()
    assert Path(file).is_relative_to(target)
    assert entry == "kv_vnorm:Vnorm kv-vnorm"
    assert policy == "vnorm:budget=64+raw"


def test_the_example_is_as_short_as_promised() -> None:
    lines = (EXAMPLE / "src" / "kv_vnorm" / "__init__.py").read_text().splitlines()
    assert len(lines) <= 50


def test_the_steps_for_a_method_show_the_example_as_it_is() -> None:
    text = (EXAMPLE.parent.parent / "docs" / "tutorials" / "method.md").read_text()
    section = text.partition("\n## In a package of its own\n")[2].partition("\n## ")[0]
    shown = re.findall(r"^ +```(?:py|toml)\n(.*?)^ +```$", section, re.MULTILINE | re.DOTALL)
    assert len(shown) == 6
    files = [EXAMPLE / "pyproject.toml", EXAMPLE / "src" / "kv_vnorm" / "__init__.py"]
    there = {line.strip() for file in files for line in file.read_text().splitlines()}
    for block in shown:
        assert {line.strip() for line in block.splitlines()} <= there, block
