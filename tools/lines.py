"""Lines of code of each method: without blank lines, comments, docstrings and imports.

A method is the file of its class, and the files of its package that it alone imports, directly or
not. Other methods, and files that these import too, are counted apart.
"""

import ast
import io
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from tools.workspace import ROOT

MOST: Final = 40  # lines of a method, but for those that say why they have more
_LAYOUT: Final = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of code of the methods of a file.

    Attributes:
        own: of the file, and of those that it alone imports.
        shared: of the other files of its package that it imports: of other methods, or that these
            import too.
    """

    own: int
    shared: int


def counted(modules: Mapping[str, str]) -> dict[str, Lines]:
    """Return the lines of methods by name, from the modules of their classes."""
    files = {name: _file(module) for name, module in modules.items()}
    needs = {file: _needed(file) for file in files.values()}

    def lines(file: Path) -> Lines:
        others = [found for other, found in needs.items() if other != file]
        elsewhere = {*needs}.union(*others)  # what others import, and other methods themselves
        own, shared = {file, *(needs[file] - elsewhere)}, needs[file] & elsewhere
        return Lines(sum(map(code_lines, own)), sum(map(code_lines, shared)))

    found = {file: lines(file) for file in needs}
    return {name: found[file] for name, file in files.items()}


@cache
def code_lines(file: Path) -> int:
    """Count the lines of a file that are neither blank, nor a comment, a docstring or an import."""
    text = file.read_text()
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    for first, last in _skipped(ast.parse(text)):
        code -= {*range(first, last + 1)}
    return len(code)


def _skipped(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """Yield the first and the last line of each docstring and each import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node.lineno, node.end_lineno or node.lineno
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield first.lineno, first.end_lineno or first.lineno


@cache
def _needed(file: Path) -> frozenset[Path]:
    """Return the other files of its package that a file imports, directly or not."""
    found: set[Path] = set()
    waiting = [file]
    while waiting:
        for other in _imported(waiting.pop()) - found - {file}:
            found.add(other)
            waiting.append(other)
    return frozenset(found)


@cache
def _imported(file: Path) -> frozenset[Path]:
    """Return the files of its package that a file imports."""
    package = file.parent.name
    names = (
        node.module
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module
    )
    ours = (name for name in names if name.partition(".")[0] == package and "." in name)
    return frozenset(_file(name) for name in ours)


@cache
def _file(module: str) -> Path:
    """Return the file of a module of this repository."""
    path = module.replace(".", "/")
    places = (f"*/*/src/{path}.py", f"*/*/src/{path}/__init__.py")
    (found,) = (file for place in places for file in sorted(ROOT.glob(place)))
    return found
