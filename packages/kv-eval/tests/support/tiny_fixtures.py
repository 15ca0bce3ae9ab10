"""Fixtures of a tiny random model on disk, with a tokenizer of single characters."""

from pathlib import Path

import pytest

from kv_transformers.models import LoadedModel, load_model
from tiny_model import save


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny chat model."""
    return save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def loaded(folder: Path) -> LoadedModel:
    """The tiny chat model."""
    return load_model(str(folder), device="cpu")
