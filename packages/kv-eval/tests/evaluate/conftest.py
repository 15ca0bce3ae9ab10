"""A tiny random model on disk, with a tokenizer of single characters, and a text for it."""

from pathlib import Path

import pytest

from kv_eval.tasks import Text
from tiny_fixtures import folder, loaded
from tiny_model import save

__all__ = ["folder", "loaded"]


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model that has no chat template."""
    return save(tmp_path_factory.mktemp("plain"), chat=False)


@pytest.fixture(scope="session")
def text() -> Text:
    """Sentences that differ."""
    words = ["river", "stone", "cloud", "light", "paper", "green", "quiet", "early"]
    sentences = (
        f"The {words[i % 8]} of {words[i * 3 % 7]} {i} is {words[i * 5 % 8]}." for i in range(200)
    )
    return Text("sentences", (" ".join(sentences),))


@pytest.fixture(scope="session")
def text_file(text: Text, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sentences in a file."""
    path = tmp_path_factory.mktemp("text") / "sentences.txt"
    path.write_text(text.body)
    return path
