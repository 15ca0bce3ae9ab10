"""What the documentation shows is what happens: its Python and its `kv-serve` commands are run.

The `python` blocks of a page run in order in one namespace. A `text` block right behind one is what
it prints. In a `console` block each line with `$ kv-serve` is run, and the lines behind it are what
it prints. `...` stands for anything. Every other `kv-serve` of a page is read by the command's own
parser. `py` blocks are run elsewhere.
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
from typing import Any

import pytest

from tools.pages import ROOT, blocks, commands, inline, pages
from tools.parsing import reach, read_command

PAGES = {page: (ROOT / page).read_text() for page in pages()}
SHOWN = [page for page in PAGES if re.search(r"^```python|^\$ kv-serve", PAGES[page], re.M)]
CALLED = [page for page in PAGES if "kv-serve " in PAGES[page]]
NEEDS_MODEL = re.compile(r"\bload_model\(\)|^\$ kv-serve (calibrate|inspect)", re.MULTILINE)
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# Where `py` blocks are compared or run: in tests/test_third_party.py, and inside vLLM.
ELSEWHERE = {"docs/tutorials/method.md", "docs/tutorials/serve.md"}


@dataclass(frozen=True)
class Run:
    """Something to run, what it should print (None: anything), and where it stands."""

    language: str
    source: str
    line: int
    output: str | None


def runs(text: str) -> Iterator[Run]:
    found = list(BLOCK.finditer(text))
    for block, after in zip(found, [*found[1:], None], strict=True):
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


def marked(page: str) -> Any:
    """A page, left out where its blocks need the real model and there is none."""
    needs = NEEDS_MODEL.search(PAGES[page])
    return pytest.param(page, marks=[pytest.mark.model] if needs else [])


@pytest.mark.parametrize("page", list(map(marked, SHOWN)))
def test_a_page_shows_what_happens(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check(PAGES[page], page, tmp_path)


@pytest.mark.parametrize("page", CALLED)
def test_every_command_is_one_that_its_parser_reads(page: str) -> None:
    for line, words in commands(PAGES[page]):
        try:
            read_command(words)
        except Exception as error:
            raise AssertionError(f"{page}:{line}: kv-serve {' '.join(words)}: {error}") from error


@pytest.mark.parametrize("page", CALLED)
def test_options_in_running_text_exist(page: str) -> None:
    for line, words in inline(PAGES[page]):
        command, rest = reach(words)
        known = {name for parameter in command.params for name in parameter.opts}
        if command.name == "serve":
            continue  # all other options are vLLM's
        named = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert named - {"--help"} <= known, f"{page}:{line}: {words}"


def test_python_that_is_not_run_here_is_tested_elsewhere() -> None:
    found = {page for page in PAGES if any(b.language == "py" for b in blocks(PAGES[page]))}
    assert found == ELSEWHERE


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


def test_commands_are_found_in_blocks_whole() -> None:
    page = (
        "```bash\nkv-serve eval --policy k8v4 \\\n    --task nll  # why\n"
        "OMP=1 kv-serve doctor | cat\n```\n\n1. In a list:\n\n"
        "   ```console\n   $ kv-serve demo\n   3 of 3\n   ```\n\n"
        "```py\nkv-serve no\n```\n"
    )
    found = [words for _, words in commands(page)]
    assert found == [["eval", "--policy", "k8v4", "--task", "nll"], ["doctor"], ["demo"]]


@pytest.mark.parametrize(
    "wrong",
    [
        "evaluate --policy k8v4",
        "eval --policy k8v4 --task nll --jsn a.json",
        "eval --policy k8v4 --task no --json a.json",
        "eval --policy k8v5 --task nll --json a.json",
        "calibrate zack --tokens 4096",
        "generate --policy zack:file=F,rat=0.3 hello",
        "serve MODEL --policy k8v4+k4v2",
    ],
)
def test_a_command_that_would_be_refused_is_noticed(wrong: str) -> None:
    with pytest.raises(Exception, match=r"\w") as caught:
        read_command(wrong.split())
    assert not isinstance(caught.value, AttributeError)
