"""Models of the hub, without network access."""

import shutil
from pathlib import Path

import pytest

from kv_transformers.models import DEFAULT_MODEL, load_model
from model_files import refusal


def test_hub_model_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    sentence = refusal("nobody/nothing")
    assert "nobody/nothing could not be downloaded from the Hugging Face hub" in sentence
    assert DEFAULT_MODEL in sentence


def hub_cache(root: Path, name: str, files: list[Path]) -> Path:
    """Create the hub's cache folder with one model, as if these files had been downloaded."""
    repository, commit = root / f"models--{name.replace('/', '--')}", "0" * 40
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for file in files:
        shutil.copy(file, snapshot)
    return snapshot


def test_hub_model_of_an_earlier_download(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = hub_cache(tmp_path, "nobody/whole", list(tiny_folder.iterdir()))
    assert load_model("nobody/whole").folder == snapshot


def test_interrupted_download(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Return the cache after a download that stopped before the weights."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    hub_cache(tmp_path, "nobody/half", [tiny_folder / "config.json"])
    sentence = refusal("nobody/half")
    assert "If its download was interrupted, run the same command" in sentence


def test_connection_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, **options: object) -> str:
        raise ConnectionError("Connection reset by peer\nand much more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", broken)
    sentence = refusal("nobody/nothing")
    assert "Connection reset by peer)" in sentence
    assert "much more" not in sentence


def test_download_leaves_out_copies_in_other_layouts(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    def download(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return str(tiny_folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert load_model("nobody/tiny").folder == tiny_folder
    assert asked["name"] == "nobody/tiny"
    from huggingface_hub.utils import filter_repo_objects

    files = ["config.json", "model.safetensors", "tokenizer.model", "chat_template.jinja"]
    others = ["model.bin", "original/model.safetensors", "consolidated.safetensors", "a.gguf"]
    patterns = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects([*files, *others], **patterns)) == files
