"""The files that a command writes: apart from each other and from what it reads, and whole."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from kv_transformers.cli.console import refuse, remark, writing


def expect_apart(inputs: Iterable[Path], what: str, named: Mapping[str, Path]) -> None:
    """Refuse two outputs in one file, and one in the place of an input.

    Args:
        inputs: files that are read.
        what: they are, as the sentence says it: `a result`.
        named: the outputs by the option that names each.
    """
    read = {os.path.realpath(file) for file in inputs}
    taken: dict[str, str] = {}
    for option, path in named.items():
        place = os.path.realpath(path)  # `Path.resolve` fails on links that lead in a circle
        if place in read:
            refuse(f"{option} names {path}, which is {what} to read; name another file")
        other = taken.setdefault(place, option)
        if other != option:
            refuse(f"{option} and {other} both name {path}; give each a file of its own")


def write_all(made: Iterable[tuple[Path, bytes]]) -> None:
    """Write files, each whole or not at all, then say so; refuse where one cannot be written."""
    from kv_policy.files import write_whole

    written = []
    for path, data in made:
        with writing(path):
            write_whole(path, data)
        written.append(path)
    for path in written:
        remark(f"Written to {path}.")
