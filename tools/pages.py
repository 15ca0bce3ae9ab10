"""What pages of the documentation show: fenced blocks, and the commands in them."""

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
SERVED: Final = "python -m nox -s serve -- "  # what follows is told to `kv-serve serve`
ENDS: Final = frozenset({"|", ">", ">>", "&&", ";", "&"})  # of a command in a line of a shell


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text without what it is indented by, and its line."""

    language: str
    text: str
    line: int


def pages() -> tuple[str, ...]:
    """Names all pages that users read, relative to the repository."""
    found = (*ROOT.glob("*.md"), *ROOT.glob("*/*/README.md"), *ROOT.glob("docs/**/*.md"))
    return tuple(sorted(str(path.relative_to(ROOT)) for path in found))


def blocks(text: str) -> Iterator[Block]:
    """Gives the fenced blocks of a page, those in lists too."""
    for found in FENCE.finditer(text):
        margin, language, body = found.groups()
        lines = (line.removeprefix(margin) for line in body.splitlines(keepends=True))
        yield Block(language, "".join(lines), text[: found.start()].count("\n") + 2)


def commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """Gives the arguments of every `kv-serve` that a page's shell blocks call, with its line.

    A line that ends in a backslash goes on in the next one. What comes behind a pipe, a redirection
    or another command is left out. What a session of nox tells `kv-serve serve` counts as its call.
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
    """Gives the words behind every `kv-serve` in running text, which need not be all of them."""
    for found in INLINE.finditer(text):
        yield text[: found.start()].count("\n") + 1, found[1].split()
