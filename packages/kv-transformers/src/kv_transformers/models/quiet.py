"""Transformers and the hub without their own messages and bars, for as long as a block lasts."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


@contextmanager
def quiet(*, hub_bars: bool = False) -> Iterator[None]:
    """Show only the errors of transformers, and put its settings back afterwards.

    Args:
        hub_bars: Leave the bars of downloads as they are; only they know how far a download is.
    """
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )
    from transformers.utils import logging

    settings: Any = logging  # several of its functions carry no types
    verbosity, bars = settings.get_verbosity(), settings.is_progress_bar_enabled()
    hub = not hub_bars and not are_progress_bars_disabled()
    settings.set_verbosity_error()
    settings.disable_progress_bar()
    if hub:
        disable_progress_bars()
    try:
        yield
    finally:
        settings.set_verbosity(verbosity)
        if bars:
            settings.enable_progress_bar()
        if hub:
            enable_progress_bars()


@contextmanager
def muted() -> Iterator[None]:
    """Drop what this thread writes to the error stream: bars that have no other switch."""
    stream: Any = _Muted(sys.stderr)
    with contextlib.redirect_stderr(stream):
        yield


class _Muted:
    """A stream that swallows one thread's writing; a spinner of another thread goes on turning."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
