"""Tests of a backend that is in a package of its own."""

from importlib.util import find_spec

import pytest

from kv_attention import available


def need(backend: str) -> None:
    """Skip where the backend's package is not installed; one that is and does not load fails."""
    reason = available()[backend]
    if reason is not None and find_spec("kv_cpu") is None:
        pytest.skip(reason)
    assert reason is None, f"{backend} is installed, and {reason}"
