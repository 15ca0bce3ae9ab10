"""A GGUF file is converted once, to the same weights and the same tokenizer."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from kv_transformers.models import cache_root, load_model, model_folder
from kv_transformers.models.convert import MANIFEST
from model_files import TEMPLATE


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
    own = loaded.tokenizer
    named = (own.unk_token_id, own.bos_token_id, own.eos_token_id, own.pad_token_id)
    assert named == (0, 1, 2, 2)  # as the file says
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
