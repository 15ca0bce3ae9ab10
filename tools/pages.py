"""Extraction of fenced blocks, and the commands in them, from pages of the documentation."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
PROGRAM: Final = "kv-serve"
SHELL: Final = frozenset({"", "bash", "console"})
FENCE: Final = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
INLINE: Final = re.compile(rf"`{PROGRAM} ([^`\n]+)`")
SERVED: Final = "python -m nox -s serve -- "  # the rest are arguments of `kv-serve serve`
ENDS: Final = frozenset({"|", ">", ">>", "&&", ";", "&"})  # end a command in a shell line


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its dedented text, and its line."""

    language: str
    text: str
    line: int


def pages() -> tuple[str, ...]:
    """Return all pages for users, relative to the repository."""
    found = (*ROOT.glob("*.md"), *ROOT.glob("*/*/README.md"), *ROOT.glob("docs/**/*.md"))
    return tuple(sorted(str(path.relative_to(ROOT)) for path in found))


def blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page, including those in lists."""
    for found in FENCE.finditer(text):
        margin, language, body = found.groups()
        lines = (line.removeprefix(margin) for line in body.splitlines(keepends=True))
        yield Block(language, "".join(lines), text[: found.start()].count("\n") + 2)


def commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the arguments of every `kv-serve` call in a page's shell blocks, with its line.

    A line that ends in a backslash continues on the next. The part after a pipe, a redirection or
    another command is left out. The nox session `serve` counts as a call of `kv-serve serve`.
    """
    for block in blocks(text):
        if block.language not in SHELL:
            continue
        whole = re.sub(r"\\\n", lambda _: "  ", block.text).replace(SERVED, f"{PROGRAM} serve ")
        for number, line in enumerate(whole.splitlines()):
            if not re.match(rf"(\$ )?(\w+=\S* )*{PROGRAM}\b", line):
                continue
            given = shlex.split(line.removeprefix("$ "), comments=True)
            given = given[given.index(PROGRAM) + 1 :]
            end = next((i for i, word in enumerate(given) if word in ENDS), len(given))
            yield block.line + number, given[:end]


def inline(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the words after every `kv-serve` in running text, which may be incomplete."""
    for found in INLINE.finditer(text):
        yield text[: found.start()].count("\n") + 1, found[1].split()
