"""Interrupted and damaged conversions, and files that cannot be converted."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kv_transformers.models import model_folder
from kv_transformers.models.convert import MANIFEST, damage
from model_files import flip, refusal, write_gguf


def old_format(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"format": 0}))


def rewrite(folder: Path, **changes: object) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | changes))


def without_weights(folder: Path) -> None:
    files = json.loads((folder / MANIFEST).read_text())["files"]
    rewrite(folder, files={name: of for name, of in files.items() if name != "model.safetensors"})
    (folder / "model.safetensors").unlink()


HARM = {
    "no files named": lambda folder: rewrite(folder, files={}),
    "no weights named": without_weights,
    "weights that nobody named": lambda folder: shutil.copy(
        folder / "model.safetensors", folder / "model-1.safetensors"
    ),
    "of another file": lambda folder: rewrite(folder, sha256="0" * 64),
    "a manifest of bytes": lambda folder: (folder / MANIFEST).write_bytes(b'{"source": "\xff"}'),
    "a deep manifest": lambda folder: (folder / MANIFEST).write_bytes(b'{"x":' * 100_000),
    "weights cut short": lambda folder: os.truncate(folder / "model.safetensors", 1000),
    "weights altered": lambda folder: flip(folder / "model.safetensors"),
    "tokenizer missing": lambda folder: (folder / "tokenizer.json").unlink(),
    "settings emptied": lambda folder: (folder / "config.json").write_bytes(b""),
    "manifest missing": lambda folder: (folder / MANIFEST).unlink(),
    "manifest cut short": lambda folder: os.truncate(folder / MANIFEST, 40),
    "older format": old_format,
}


@pytest.mark.parametrize("harm", HARM)
def test_damaged_conversion_is_done_again(tiny_gguf: Path, filled: Path, harm: str) -> None:
    assert damage(filled) is None
    HARM[harm](filled)
    assert damage(filled) is not None
    lines: list[str] = []
    assert model_folder(str(tiny_gguf), progress=lines.append) == filled
    assert [line for line in lines if "is damaged" in line]
    assert damage(filled) is None


@pytest.mark.parametrize("leftover", ["empty", "whole"])
def test_leftovers_are_cleared_and_never_used(
    tiny_gguf: Path, cache: Path, tiny_converted: Path, leftover: str
) -> None:
    partial = cache / f".{tiny_converted.name}.abc123.partial"
    if leftover == "whole":
        shutil.copytree(tiny_converted, partial)
    else:
        partial.mkdir(parents=True)
    lines: list[str] = []
    folder = model_folder(str(tiny_gguf), progress=lines.append)
    assert [line for line in lines if "unpacking" in line]
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [folder.name]


KILLED = """
import os, signal, sys
from kv_transformers.models import model_folder
from kv_transformers.models import convert

def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

convert._write_manifest = die  # everything else has been written
model_folder(sys.argv[1])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot kill like that")
def test_conversion_survives_a_kill(tiny_gguf: Path, cache: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tiny_gguf)]
    killed = subprocess.run(command, capture_output=True, check=False, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    (partial,) = (path for path in cache.iterdir() if path.is_dir())
    assert (partial / "model.safetensors").is_file()
    folder = model_folder(str(tiny_gguf))
    assert not partial.exists()
    assert damage(folder) is None


def test_one_converts_and_the_other_waits(tiny_gguf: Path, cache: Path) -> None:
    waiting = threading.Event()
    lines: list[str] = []

    def slow(line: str) -> None:
        lines.append(line)
        if "reading the tokenizer" in line:
            assert waiting.wait(60)

    def other(line: str) -> None:
        lines.append(line)
        waiting.set()

    folders: list[Path] = []
    first = threading.Thread(
        target=lambda: folders.append(model_folder(str(tiny_gguf), progress=slow))
    )
    first.start()
    while not any("reading the tokenizer" in line for line in lines):
        assert first.is_alive()
    folders.append(model_folder(str(tiny_gguf), progress=other))
    first.join()
    assert folders[0] == folders[1]
    assert sum("unpacking" in line for line in lines) == 1
    assert sum("another process" in line for line in lines) == 1


BAD_FILES = {
    "empty": lambda data: b"",
    "no GGUF": lambda data: b"PK\x03\x04" + data,
    "garbage after the magic": lambda data: b"GGUF" + b"x" * 1000,
    "cut in the header": lambda data: data[:3000],
    "cut in the weights": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_gguf(tiny_gguf: Path, cache: Path, tmp_path: Path, kind: str) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(BAD_FILES[kind](tiny_gguf.read_bytes()))
    sentence = refusal(str(bad))
    assert str(bad) in sentence
    assert sentence.endswith("download the file again")
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_gguf_with_values_that_are_not_finite(cache: Path, tmp_path: Path) -> None:
    sentence = refusal(str(write_gguf(tmp_path / "bad.gguf", poison=True)))
    assert "model.layers.1.mlp.up_proj.weight holds values that are not finite" in sentence


def test_cache_that_cannot_be_written(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("KV_SERVE_CACHE", str(tmp_path / "file"))
    sentence = refusal(str(tiny_gguf))
    assert "Not a directory" in sentence
    assert "KV_SERVE_CACHE" in sentence


def test_disk_that_is_full(tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedModel

    def full(self: object, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"some")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    assert "No space left" in refusal(str(tiny_gguf))
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_a_link_in_the_place_of_the_lock_is_not_followed(
    tiny_gguf: Path, cache: Path, tiny_converted: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("dear")
    cache.mkdir(parents=True)
    (cache / f".{tiny_converted.name}.lock").symlink_to(victim)
    assert "symbolic links" in refusal(str(tiny_gguf))
    assert victim.read_text() == "dear"
