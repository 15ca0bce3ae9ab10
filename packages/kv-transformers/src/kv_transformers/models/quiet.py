"""Context managers that suppress messages and progress bars of transformers and the hub."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


@contextmanager
def quiet(*, hub_bars: bool = False) -> Iterator[None]:
    """Show only errors of transformers, and restore its settings afterwards.

    Args:
        hub_bars: Keep the progress bars of downloads.
    """
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )
    from transformers.utils import logging

    settings: Any = logging  # several of its functions are untyped
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
    """Discard this thread's writes to stderr, for progress bars without a setting."""
    stream: Any = _Muted(sys.stderr)
    with contextlib.redirect_stderr(stream):
        yield


class _Muted:
    """A stream that discards the writes of one thread, so that other threads' spinners work."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
