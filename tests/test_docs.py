"""What the documentation shows is what happens: its Python and its `kv-serve` commands are run.

The `python` blocks of a page run in order in one namespace. A `text` block right behind one is what
it prints. In a `console` block each line with `$ kv-serve` is run, and the lines behind it are what
it prints. `...` stands for anything.
"""

import contextlib
import doctest
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.md"), *ROOT.glob("*/*/README.md"), *ROOT.glob("docs/**/*.md"))
    if re.search(r"^```python|^\$ kv-serve", path.read_text(), re.MULTILINE)
)
WITH_MODEL = {"README.md", "docs/inspect.md", "docs/tutorial.md", "packages/kv-serve/README.md"}
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Run:
    """Something to run, what it should print (None: anything), and where it stands."""

    language: str
    source: str
    line: int
    output: str | None


def runs(text: str) -> Iterator[Run]:
    blocks = list(BLOCK.finditer(text))
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        language, body = block.groups()
        line = text[: block.start()].count("\n") + 2
        if language == "python":
            gap = text[block.end() : after.start()] if after else ""
            printed = after and after[1] == "text" and not gap.strip()
            yield Run("python", body, line, after[2] if after and printed else None)
        elif language == "console":
            for command, output in re.findall(r"^\$ (kv-serve .*)\n((?:(?!\$ ).*\n)*)", body, re.M):
                yield Run("console", command, line, output or None)


def printed_by(run: Run, page: str, names: dict[str, object], folder: Path) -> str:
    if run.language == "python":
        code = compile("\n" * (run.line - 1) + run.source, page, "exec")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, names)
        return out.getvalue()
    program, *arguments = shlex.split(run.source)
    command = [str(Path(sys.executable).parent / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, f"{page}:{run.line}: {run.source}\n{done.stderr}"
    return done.stdout


def check(text: str, page: str, folder: Path) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    for run in runs(text):
        got = printed_by(run, page, names, folder)
        if run.output is not None:
            example = doctest.Example(run.source, run.output)
            checker = doctest.OutputChecker()
            right = checker.check_output(run.output, got, FLAGS)
            assert right, f"{page}:{run.line}:\n{checker.output_difference(example, got, FLAGS)}"


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=[pytest.mark.model] if p in WITH_MODEL else []) for p in PAGES],
)
def test_a_page_shows_what_happens(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check((ROOT / page).read_text(), page, tmp_path)


def test_blocks_share_names_and_their_output_is_compared(tmp_path: Path) -> None:
    first = "```python\nx = 1\n```\n"
    check(f"{first}\nand\n\n```python\nprint(x, 2)\n```\n\n```text\n1 ...\n```\n", "page", tmp_path)
    with pytest.raises(AssertionError, match="Expected"):
        check(f"{first}```python\nprint(x)\n```\n```text\n2\n```\n", "page", tmp_path)


def test_an_error_names_its_page_and_line(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        check("text\n\n```python\n\n1 / 0\n```\n", "page.md", tmp_path)
    last = caught.traceback[-1]
    assert (str(last.path).rsplit("/", 1)[-1], last.lineno + 1) == ("page.md", 5)
