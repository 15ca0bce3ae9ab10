"""The source text of prompts: a file, or text that every Python installation has."""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from kv_eval.tasks.sample import TaskError

LONGEST_PIECE = 60  # words; a text without full stops still has positions for a needle
_PARAGRAPH = re.compile(r"\n\s*\n")
_SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<=[.!?][\"')\]])\s+")


@dataclass(frozen=True, slots=True)
class Text:
    """A named text, as paragraphs of words separated by single spaces."""

    name: str
    paragraphs: tuple[str, ...] = field(repr=False)

    def __post_init__(self) -> None:
        """Check that the text has words."""
        if not self.paragraphs:
            raise TaskError(f"the text {self.name} has no words; use another text")

    @property
    def body(self) -> str:
        """The paragraphs, one per line."""
        return "\n".join(self.paragraphs)

    @property
    def digest(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of the body."""
        return digest(self.body)

    def pieces(self) -> tuple[tuple[str, ...], ...]:
        """Return the text as sentences of words; a sentence above 60 words is split."""
        found: list[tuple[str, ...]] = []
        for paragraph in self.paragraphs:
            for sentence in _SENTENCE.split(paragraph):
                words = sentence.split()
                found += [
                    tuple(words[i : i + LONGEST_PIECE]) for i in range(0, len(words), LONGEST_PIECE)
                ]
        return tuple(found)


def digest(body: str) -> str:
    """Return the first 16 hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(body.encode()).hexdigest()[:16]


def read_text(path: str | Path) -> Text:
    """Read a UTF-8 file, one paragraph between blank lines.

    Raises:
        TaskError: the file is missing, is not UTF-8, or has no words.
    """
    path = Path(path)
    return Text(path.name, _paragraphs(read_raw(path)))


def read_raw(path: Path) -> str:
    """Read a UTF-8 file as it stands, with its line breaks.

    Raises:
        TaskError: the file is missing or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not UTF-8 text; convert it first") from error
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise TaskError(f"cannot read the text {str(path)[:200]}: {reason}") from error


def default_text() -> Text:
    """Return the prose of CPython's `help()` topics, about 30,000 tokens.

    It differs slightly between versions of Python; the name contains the version.

    Raises:
        TaskError: this Python was installed without `pydoc_data`.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise TaskError(
            "this Python lacks pydoc_data, the source of the default text; pass a text file"
        ) from error
    import sys

    raw = "\n\n".join(topics[name] for name in sorted(topics))
    prose = dict.fromkeys(filter(_is_prose, _paragraphs(raw)))  # topics quote each other
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Text(f"python-{version}-topics", tuple(prose))


def _paragraphs(raw: str) -> tuple[str, ...]:
    joined = (" ".join(part.split()) for part in _PARAGRAPH.split(raw))
    return tuple(part for part in joined if part)


def _is_prose(paragraph: str) -> bool:
    """Leave out headings, grammars, tables and code."""
    plain = sum(letter.isalpha() or letter == " " for letter in paragraph) / len(paragraph)
    return len(paragraph) > 80 and paragraph[0].isupper() and paragraph[-1] == "." and plain > 0.88
