"""Output files of a command: distinct from each other and from its inputs, written atomically."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from kv_transformers.cli.console import refuse, remark, writing


def expect_apart(inputs: Iterable[Path], what: str, named: Mapping[str, Path]) -> None:
    """Refuse two outputs with the same file, or an output that overwrites an input.

    Args:
        inputs: input files.
        what: the kind of input, for messages: `a result`.
        named: outputs by option.
    """
    read = {os.path.realpath(file) for file in inputs}
    taken: dict[str, str] = {}
    for option, path in named.items():
        place = os.path.realpath(path)  # `Path.resolve` fails on circular links
        if place in read:
            refuse(f"{option} names {path}, which is {what} to read; use another file")
        other = taken.setdefault(place, option)
        if other != option:
            refuse(f"{option} and {other} both name {path}; use a different file for each")


def write_all(made: Iterable[tuple[Path, bytes]]) -> None:
    """Write files atomically, then report them; refuse if one cannot be written."""
    from kv_policy.files import write_whole

    written = []
    for path, data in made:
        with writing(path):
            write_whole(path, data)
        written.append(path)
    for path in written:
        remark(f"Written to {path}.")
