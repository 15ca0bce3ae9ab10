"""A tiny random model on disk, and a text for it."""

import pytest

from kv_eval.tasks import Text
from task_text import plain_text
from tiny_fixtures import folder, loaded

__all__ = ["folder", "loaded", "text"]


@pytest.fixture(scope="session")
def text() -> Text:
    """Plain words."""
    return plain_text(900)
