"""Texts of several kinds to calibrate with, from any Python installation."""

import ast
import importlib
import inspect
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kv_eval.tasks.text import digest, read_raw

_DOCUMENTED: Final = (
    "argparse asyncio collections configparser contextlib datetime decimal email.message fractions "
    "ftplib functools heapq http.client imaplib ipaddress json locale logging mailbox "
    "multiprocessing.pool optparse os pathlib pickle platform plistlib random re sched selectors "
    "shelve shutil smtplib socket socketserver sqlite3 ssl statistics string struct subprocess "
    "tarfile tempfile textwrap threading tokenize traceback types typing unittest unittest.mock "
    "urllib.parse urllib.request uuid venv warnings weakref zipfile"
)
_SOURCES: Final = "argparse ast csv heapq textwrap zipfile configparser statistics pathlib shutil"
_PEOPLE: Final = "Ada Boris Chiara Deniz Elif Farid Greta Hana Ivo Jonas Kira Lena Mateo Nuria Omar"
_PLACES: Final = "Lisbon Oslo Tartu Nantes Quito Kyoto Accra Turin Leeds Perth Bergen Cusco Hanoi"
_GOODS: Final = "lemons copper wool paper bicycles clocks honey timber glass salt lamps carpets"
_REPLIES: Final = (
    "That is later than I thought, so I would rather call them first.",
    "Good. I will write it down before I forget it again.",
    "I am not sure about that; did you ask anybody else?",
    "Then we should leave early, because the road is slow in the rain.",
    "Fine with me, as long as somebody tells the driver.",
    "No, last year it was different, and nobody was happy with it.",
)
_LINES: Final = 1500  # generated lines of each kind


@dataclass(frozen=True, slots=True)
class Passage:
    """A named text, as it stands, with its line breaks."""

    name: str
    body: str = field(repr=False)

    @property
    def digest(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of the body."""
        return digest(self.body)


def read_passage(path: Path) -> Passage:
    """Read a UTF-8 file.

    Raises:
        ValueError: the file is missing, is not UTF-8, or has no words.
    """
    body = read_raw(path)
    if not body.strip():
        raise ValueError(f"the text {path} has no words; use another text")
    return Passage(path.name, body)


def default_passages() -> tuple[Passage, ...]:
    """Return documentation and source code of Python, and generated dialogues and records.

    They differ between versions of Python, and share nothing with the help topics that tasks use.
    """
    return (
        Passage("documentation", "\n\n".join(_documentation())),
        Passage("code", "\n\n".join(_sources())),
        Passage("dialogue", "\n".join(_dialogue(random.Random(1)))),
        Passage("records", "\n".join(_records(random.Random(2)))),
    )


def _documentation() -> Iterator[str]:
    """Yield the docstrings in the source of modules, in order, each once."""
    seen: set[str] = set()
    for name in _DOCUMENTED.split():
        for node in ast.walk(ast.parse(_source(name))):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            text = ast.get_docstring(node)
            if text and len(text) > 80 and text not in seen:
                seen.add(text)
                yield text


def _sources() -> Iterator[str]:
    for name in _SOURCES.split():
        yield _source(name)


def _source(name: str) -> str:
    return inspect.getsource(importlib.import_module(name))


def _dialogue(chance: random.Random) -> Iterator[str]:
    """Yield turns of invented conversations about deliveries."""
    people, places, goods = _PEOPLE.split(), _PLACES.split(), _GOODS.split()
    for _ in range(_LINES // 6):
        first, second = chance.sample(people, 2)
        place, other = chance.sample(places, 2)
        what, count = chance.choice(goods), chance.randint(3, 900)
        day, hour = chance.randint(2, 28), chance.randint(6, 21)
        yield f"{first}: How many boxes of {what} go to {place} this time?"
        yield f"{second}: It was {count} in the letter, and they leave at {hour} on the {day}th."
        yield f"{first}: {chance.choice(_REPLIES)}"
        yield f"{second}: {chance.choice(people)} from {other} will know; ask for room {count + 7}."
        yield f"{first}: {chance.choice(_REPLIES)}"
        yield ""


def _records(chance: random.Random) -> Iterator[str]:
    """Yield lines of invented registers: dates, numbers, codes, names and places."""
    people, places, goods = _PEOPLE.split(), _PLACES.split(), _GOODS.split()
    for _ in range(_LINES):
        date = f"20{chance.randint(10, 25)}-{chance.randint(1, 12):02}-{chance.randint(1, 28):02}"
        code = f"{chance.choice('KLMRT')}{chance.randint(1000, 99999)}"
        who, place, what = chance.choice(people), chance.choice(places), chance.choice(goods)
        price = f"{chance.randint(5, 9000)}.{chance.randint(0, 99):02}"
        yield chance.choice(
            (
                f"{date} order {code}: {what} for {who} in {place}, {price} paid",
                f"{date} {who} ({place}) has the new number {chance.randint(10**6, 10**7)}",
                f"{date} store {chance.randint(1, 40)}: {chance.randint(1, 900)} {what}, {code}",
                f"The key of {who} in {place} is {chance.randint(1000, 99999)}, since {date}.",
            )
        )
