"""Every kernel is launched on the device of its tensors: inside `launching_on`, in all packages."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.pages import ROOT

SOURCES = sorted(ROOT.glob("packages/*/src/**/*.py"))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def kernels() -> set[str]:
    """Names of the functions that Triton compiles and that have no result: kernels."""
    return {
        node.name
        for path in SOURCES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
    }


def launches(tree: ast.AST, names: set[str], inside: bool = False) -> Iterator[tuple[int, bool]]:
    """Yield the line of each launch, and whether it is inside `launching_on`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            what = ast.unparse(node.func.value).rpartition(".")[2]
            if what in names:
                yield node.lineno, inside
        guards = isinstance(node, ast.With) and any(
            ast.unparse(item.context_expr).startswith("launching_on(") for item in node.items
        )
        yield from launches(node, names, inside or guards)


@pytest.mark.parametrize("package", sorted({path.parts[len(ROOT.parts) + 1] for path in SOURCES}))
def test_kernels_are_launched_on_the_device_of_their_tensors(package: str) -> None:
    names = kernels()
    found = {
        f"{path.relative_to(ROOT)}:{line}": inside
        for path in SOURCES
        if package in path.parts
        for line, inside in launches(parsed(path), names)
    }
    assert [place for place, inside in found.items() if not inside] == []
    if package in ("kv-attention", "kv-evict", "kv-paging"):
        assert found


def test_a_launch_without_a_device_is_seen() -> None:
    tree = ast.parse("with launching_on(q):\n    some[(1,)](q)\nsome[(1,)](q)\nother[0](q)\n")
    assert list(launches(tree, {"some"})) == [(2, True), (3, False)]
