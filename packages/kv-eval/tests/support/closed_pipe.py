"""The command line with a standard output that nobody reads any more, as `| head` leaves it."""

import os
import sys

import pytest

from kv_serve.cli import main


def run_unread(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """Run a command whose standard output is a closed pipe; give the status it leaves with."""
    reading, writing = os.pipe()
    os.close(reading)
    with monkeypatch.context() as patch, os.fdopen(writing, "w") as unread:
        patch.setattr(sys, "stdout", unread)
        patch.setattr(sys, "argv", ["kv-serve", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
    return int(left.value.code or 0)
