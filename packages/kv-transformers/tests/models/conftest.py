"""A tiny model as a GGUF file, converted, and as a folder; and an empty conversion cache."""

import shutil
from pathlib import Path

import pytest

from kv_transformers.models import model_folder
from kv_transformers.models.convert import MANIFEST
from model_files import write_gguf


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_converted(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a converted model, for tests to copy and damage."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KV_SERVE_CACHE", str(tmp_path_factory.mktemp("converted")))
        return model_folder(str(tiny_gguf))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KV_SERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def filled(cache: Path, tiny_converted: Path) -> Path:
    """Return a cache with an intact conversion of the tiny file."""
    return Path(shutil.copytree(tiny_converted, cache / tiny_converted.name))


@pytest.fixture
def tiny_folder(tiny_converted: Path, tmp_path: Path) -> Path:
    """Return a model's folder that is not a conversion."""
    folder = Path(shutil.copytree(tiny_converted, tmp_path / "folder"))
    (folder / MANIFEST).unlink()
    return folder
