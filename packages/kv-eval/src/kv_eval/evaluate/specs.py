"""The caches of an evaluation: policies by their text form, and `full`."""

import re
from collections.abc import Iterable
from itertools import product

from kv_policy.part import split
from kv_transformers.from_text import FULL, read_spec

_NAME_ENDS = re.compile(r"[+:,]")
_OPENS, _CLOSES = re.compile(r"(?<!\\)\{"), re.compile(r"(?<!\\)\}")
_CHOICE = re.compile(r"(?<!\\)\{([^{}]*)(?<!\\)\}")


def split_specs(text: str) -> list[str]:
    """Split a list of text forms at the commas between them.

    A comma starts a new text form if the text up to the next `+`, `:`, `,` or the end has no `=`:
    then it is a policy's name, else another parameter of the previous policy. A comma after a
    backslash belongs to a value, as in `parse`, and one in braces to a choice, as in
    `expand`.

    >>> split_specs("full,snapkv:budget=1024,window=32+k8v4,k4v2")
    ['full', 'snapkv:budget=1024,window=32+k8v4', 'k4v2']
    """
    found: list[str] = []
    for piece in split(text, ","):
        names = "=" not in _NAME_ENDS.split(piece, maxsplit=1)[0]
        if not found or (names and not _is_open(found[-1])):
            found.append(piece)
        else:
            found[-1] += f",{piece}"
    return [spec.strip() for spec in found]


def expand(spec: str) -> list[str]:
    """Return every text form of a grid: one for each choice in braces.

    A brace after a backslash belongs to a value.

    >>> expand("kv-compress:keep={50,25}%+k{8,4}v4")[1:]
    ['kv-compress:keep=50%+k4v4', 'kv-compress:keep=25%+k8v4', 'kv-compress:keep=25%+k4v4']

    Raises:
        ValueError: a brace is unbalanced or nested.
    """
    pieces = _CHOICE.split(spec)
    if any(_OPENS.search(text) or _CLOSES.search(text) for text in pieces[::2]):
        raise ValueError(
            f"{spec!r} has an unbalanced brace; write choices as in keep={{50,25}}%, or a "
            "backslash before a brace that belongs to a value"
        )
    choices = [piece.split(",") if i % 2 else [piece] for i, piece in enumerate(pieces)]
    return ["".join(chosen) for chosen in product(*choices)]


def read_specs(texts: Iterable[str]) -> tuple[str, ...]:
    """Parse lists of text forms into canonical ones, with `full` first, given or not.

    Grids are expanded.

    Raises:
        ValueError: an empty item, a policy that is given twice, or any error of `parse`.
    """
    found = [FULL]
    for text in texts:
        for spec in (one for grid in split_specs(text) for one in expand(grid)):
            if not spec:
                raise ValueError(
                    f"{text!r} has an empty item; separate names by commas, for example k8v4,k4v2"
                )
            canonical = read_spec(spec)
            if canonical == FULL:
                continue
            if canonical in found:
                raise ValueError(f"the policy {canonical} is named twice; name it once")
            found.append(canonical)
    return tuple(found)


def _is_open(text: str) -> bool:
    return len(_OPENS.findall(text)) > len(_CLOSES.findall(text))
