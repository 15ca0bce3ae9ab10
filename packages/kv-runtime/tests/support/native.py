"""Tests of a backend that is in a package of its own."""

import pytest

from kv_attention import all_backends


def need(backend: str) -> None:
    """Skip where the backend's package is not installed; one that is and does not load fails."""
    found = all_backends()[backend]
    reason = found.missing()
    if not found.installed:
        pytest.skip(f"{backend}: {reason}")
    assert reason is None, f"{backend} is installed, and {reason}"
