"""The benchmarks import what the packages have."""

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

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
