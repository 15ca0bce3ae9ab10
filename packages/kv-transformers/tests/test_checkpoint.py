"""Checkpoints with a value basis in their weights, compared with the models they are made from."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitNetConfig,
    Cohere2Config,
    DynamicCache,
    Gemma2Config,
    GemmaConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

from kv_policy import Capabilities, FoldsValues, parse
from kv_transformers import CompressedCache, Fold, ModelError, passing
from kv_transformers import checkpoint as module
from kv_transformers.checkpoint import write_folded
from kv_transformers.fitted import WrongModelError
from kv_transformers.from_text import folded
from kv_transformers.models.folder import fingerprint
from kv_transformers.models.mark import MARK, mark_of
from kv_transformers.support import UnsupportedModelError
from noise_statistics import write_statistics
from small_sizes import SIZES

HEADS = SIZES | {"num_attention_heads": 4, "head_dim": 12}
OPT = OPTConfig(
    vocab_size=101,
    hidden_size=48,
    ffn_dim=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
    word_embed_proj_dim=48,
)
HYBRID = Qwen3NextConfig(
    **SIZES,
    head_dim=8,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    linear_num_value_heads=2,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    num_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)
MODELS: dict[str, PreTrainedConfig] = {
    "llama, groups of 1": LlamaConfig(**HEADS | {"num_key_value_heads": 4}),
    "llama, groups of 2": LlamaConfig(**HEADS, attention_bias=True),
    "llama, groups of 4, tied": LlamaConfig(
        **HEADS | {"num_key_value_heads": 1}, tie_word_embeddings=True
    ),
    "qwen2, value bias": Qwen2Config(**SIZES),
    "qwen3, norms of queries and keys": Qwen3Config(**SIZES, head_dim=10),
    "gemma, heads of another width": GemmaConfig(**SIZES, head_dim=10),
    "gemma2, windows between": Gemma2Config(**SIZES, head_dim=10, sliding_window=8),
    "cohere2, windows between": Cohere2Config(
        **SIZES,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1),
    "opt": OPT,
}
LLAMA = "llama, groups of 2"
RAGGED = "rate=0.3,multiple=1"


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype in which a model is compared; experts are not computed in float64."""
    return torch.float32 if name == "mixtral" else torch.float64


def write(config: PreTrainedConfig, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write a model with large random weights and biases."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 or name.endswith("bias"):
            nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float64):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def logits(model, cache=None, length: int = 30):
    """Return the logits of a prompt and three decode steps."""
    torch.manual_seed(3)
    ids = torch.randint(3, 101, (2, length))
    cache = DynamicCache(config=model.config) if cache is None else cache
    parts = (ids[:, :-3], *ids[:, -3:].split(1, 1))
    return torch.cat([model(x, **passing(model, cache)).logits for x in parts], 1)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Callable[[str], tuple[Path, str, Path]]:
    """Write a model in float64, its statistics, and the folded checkpoint; once for each."""
    known: dict[str, tuple[Path, str, Path]] = {}

    def found(name: str) -> tuple[Path, str, Path]:
        if name not in known:
            root = tmp_path_factory.mktemp("folded")
            source = write(MODELS[name], root / "model", dtype_of(name))
            policy = f"zack:file={write_statistics(source, root / 'zack')},{RAGGED}"
            write_folded(str(source), parse(policy), root / "out")
            known[name] = source, policy, root / "out"
        return known[name]

    return found


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("name", MODELS)
def test_it_computes_what_the_model_computes(made, name: str) -> None:
    source, _, out = made(name)
    dtype = dtype_of(name)
    want, found = logits(load(source, dtype)), logits(load(out, dtype))
    assert float((found - want).norm() / want.norm()) < 4000 * torch.finfo(dtype).eps
    before, after = tensors(source), tensors(out)
    assert before.keys() == after.keys()
    changed = {n for n, x in before.items() if not torch.equal(x, after[n])}
    ends = ("v_proj.weight", "v_proj.bias", "o_proj.weight", "out_proj.weight")
    assert changed
    assert all(n.endswith(ends) for n in changed)
    for n, x in before.items():
        assert (x.shape, x.dtype) == (after[n].shape, after[n].dtype)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("more", ["", "+k8v4", "+snapkv:budget=12,window=4", "+k8v4:window=4"])
def test_under_the_policy_it_computes_what_the_model_does(made, name: str, more: str) -> None:
    source, policy, out = made(name)
    before, after = load(source, torch.float32), load(out, torch.float32)
    old, new = (CompressedCache(each, policy + more) for each in (before, after))
    want, found = logits(before, old), logits(after, new)
    # Rounding may change integer codes by one step.
    assert float((found - want).norm() / want.norm()) < (0.02 if "k8v4" in more else 1e-3)
    assert new.memory().vector_bytes == old.memory().vector_bytes
    assert torch.equal(new.memory().tokens, old.memory().tokens)
    bases = new.runtime.bases
    assert bases is not None
    assert bases.value_maps == (None,) * len(bases.value_maps)
    assert bases.nbytes < old.memory().basis_bytes


def test_it_generates_the_same_under_every_share(made) -> None:
    source, policy, out = made(LLAMA)
    before, after = load(source, torch.float32), load(out, torch.float32)
    ids = torch.randint(3, 101, (1, 20))
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    file = policy.partition(",")[0]
    for spec in (policy, f"{file},rate=0", f"{file},keep=50%,multiple=2,ranks=uniform"):
        want = before.generate(ids, **passing(before, CompressedCache(before, spec)), **options)
        found = after.generate(ids, **passing(after, CompressedCache(after, spec)), **options)
        assert torch.equal(found, want)


@pytest.mark.parametrize("policy", ["raw", "k8v4", "snapkv:budget=12,window=4+k8v4"])
def test_without_a_basis_it_is_a_model_like_any(made, policy: str) -> None:
    source, _, out = made(LLAMA)
    before, after = load(source, torch.float32), load(out, torch.float32)
    want = logits(before, CompressedCache(before, policy))
    found = logits(after, CompressedCache(after, policy))
    assert float((found - want).norm() / want.norm()) < (1e-4 if policy == "raw" else 0.1)


def test_the_policy_of_the_fold_is_not_folded_again(made) -> None:
    _, policy, out = made(LLAMA)
    model = load(out, torch.float32)
    with folded(model, policy) as reason:
        assert reason is None
        logits(model, CompressedCache(model, policy))
    with pytest.raises(ValueError, match="of a folded checkpoint, so nothing is left to fold"):
        Fold(model, policy)


def test_other_bases_are_refused(made, tmp_path: Path) -> None:
    source, policy, out = made(LLAMA)
    model = load(out, torch.float32)
    file = policy.removeprefix("zack:file=").partition(",")[0]
    other = write_statistics(source, tmp_path / "other", seed=1)
    mark = mark_of(model.config)
    assert mark is not None
    for spec in ("hadamard", "hadamard+k8v4", f"kq-svd:file={file},{RAGGED}"):
        with pytest.raises(ValueError, match=f"maps values.* the value basis {mark.basis}"):
            CompressedCache(model, spec)
    with pytest.raises(ValueError, match=f"hold the value basis {mark.basis}, but that of"):
        CompressedCache(model, f"zack:file={other},{RAGGED}")
    again = write_statistics(out, tmp_path / "again")
    with pytest.raises(ValueError, match=f"hold the value basis {mark.basis}, but that of"):
        CompressedCache(model, f"zack:file={again},{RAGGED}")
    wrong = write_statistics(write(MODELS[LLAMA], tmp_path / "m"), tmp_path / "wrong")
    with pytest.raises(WrongModelError, match="calibrated with the model"):
        CompressedCache(model, f"zack:file={wrong},{RAGGED}")
    CompressedCache(model, f"think:file={file}")  # of keys alone


def test_a_mark_on_weights_that_were_not_folded_is_refused(made, tmp_path: Path) -> None:
    source, policy, out = made(LLAMA)
    shutil.copytree(source, tmp_path / "model")
    shutil.copy(out / "config.json", tmp_path / "model")
    with pytest.raises(
        WrongModelError, match=r"marked as folded .* are not those that were written"
    ):
        CompressedCache(load(tmp_path / "model"), policy)
    shutil.copytree(out, tmp_path / "unmarked")
    shutil.copy(source / "config.json", tmp_path / "unmarked")
    with pytest.raises(WrongModelError, match="calibrated with the model"):
        CompressedCache(load(tmp_path / "unmarked"), policy)
    config = json.loads((out / "config.json").read_text())
    config[MARK]["basis"] = "nothing"
    shutil.copytree(out, tmp_path / "damaged")
    (tmp_path / "damaged" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"kv_folded in the model's config.json is damaged"):
        CompressedCache(load(tmp_path / "damaged"), "raw")


def test_files_are_written_one_by_one_and_others_are_copied(tmp_path: Path) -> None:
    source = write(MODELS[LLAMA], tmp_path / "model")
    model = load(source, torch.float32)
    shutil.rmtree(source)
    model.save_pretrained(source, max_shard_size="20KB")
    (source / "tokenizer.json").write_text("{}")
    (source / "LICENSE").write_text("free")
    (source / "pytorch_model.bin").write_text("old weights")
    (source / "consolidated.safetensors").write_text("old weights")
    (source / "kv-serve.json").write_text("{}")
    (source / "original").mkdir()
    before = {path: path.read_bytes() for path in source.iterdir() if path.is_file()}
    policy = parse(f"zack:file={write_statistics(source, tmp_path / 'zack')},{RAGGED}")
    said: list[str] = []
    out = tmp_path / "new" / "out"
    mark = write_folded(str(source), policy, out, progress=said.append)
    assert {path: path.read_bytes() for path in before} == before
    names = {path.name for path in source.glob("model*")} | {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "LICENSE",
    }
    assert {path.name for path in out.iterdir()} == names
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(shards) > 2
    assert said[-len(shards) :] == [
        f"writing {name} ({i} of {len(shards)})" for i, name in enumerate(shards, 1)
    ]
    assert mark.model == fingerprint(out)
    assert mark.source == fingerprint(source)
    for name in shards:
        with safe_open(out / name, "pt") as opened:
            assert opened.metadata() == {"format": "pt", MARK: mark.basis}
    want, found = logits(load(source)), logits(load(out))
    assert float((found - want).norm() / want.norm()) < 1e-5
    assert out.stat().st_mode & 0o777 == 0o777 & ~umask()


def umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_nothing_half_written_is_left(tmp_path: Path, monkeypatch, error) -> None:
    source = write(MODELS[LLAMA], tmp_path / "model")
    policy = parse(f"zack:file={write_statistics(source, tmp_path / 'zack')},{RAGGED}")
    out = tmp_path / "here" / "out"
    monkeypatch.setattr(module, "fingerprint", failing_at(out.parent, error))
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            write_folded(str(source), policy, out)
    else:
        with pytest.raises(ModelError, match=r"cannot be written \(No space left on device\)"):
            write_folded(str(source), policy, out)
    assert [*out.parent.iterdir()] == []


def failing_at(parent: Path, error):
    def found(folder: Path) -> str:
        if folder.parent == parent:
            assert (folder / "model.safetensors").exists()
            raise error
        return fingerprint(folder)

    return found


def test_only_a_new_or_empty_folder_is_written(made, tmp_path: Path) -> None:
    source, policy, _ = made(LLAMA)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ModelError, match="full has files in it; name a folder that does not exist"):
        write_folded(str(source), parse(policy), tmp_path / "full")
    with pytest.raises(ModelError, match="file is a file"):
        write_folded(str(source), parse(policy), tmp_path / "full" / "file")
    (tmp_path / "empty").mkdir()
    write_folded(str(source), parse(policy), tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").exists()


def test_what_has_no_rotation_of_values_is_refused(made, tmp_path: Path) -> None:
    source, policy, out = made(LLAMA)
    file = policy.removeprefix("zack:file=").partition(",")[0]
    for spec in ("k8v4", "hadamard", f"kq-svd:file={file},{RAGGED}", f"think:file={file}"):
        with pytest.raises(ValueError, match="has no value basis that a checkpoint can hold"):
            write_folded(str(source), parse(spec), tmp_path / "out")
    with pytest.raises(ModelError, match="is a folded checkpoint already"):
        write_folded(str(out), parse(policy), tmp_path / "out")
    other = write(MODELS["llama, groups of 1"], tmp_path / "other")
    with pytest.raises(WrongModelError, match="was calibrated with the model"):
        write_folded(str(other), parse(policy), tmp_path / "out")
    with pytest.raises(ModelError, match="unknown model"):
        write_folded("./nowhere", parse(policy), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_quantized_weights_and_adapters_are_refused(made, tmp_path: Path) -> None:
    source, policy, _ = made(LLAMA)
    shutil.copytree(source, tmp_path / "model")
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="has an adapter"):
        write_folded(str(tmp_path / "model"), parse(policy), tmp_path / "out")
    config = json.loads((source / "config.json").read_text())
    for place in (config, config.setdefault("text_config", {})):
        place["quantization_config"] = {"quant_method": "fp8"}
        (tmp_path / "model" / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match="are quantized, and a rotation would be lost"):
            write_folded(str(tmp_path / "model"), parse(policy), tmp_path / "out")
        del place["quantization_config"]


REFUSED = {
    "phi3": (Phi3Config(**SIZES), "no projections called v_proj and o_proj"),
    "olmo": (OlmoConfig(**SIZES, clip_qkv=0.05), "clips values to 0.05"),
    "bitnet": (BitNetConfig(**SIZES), "has an operation before o_proj"),
    "qwen3-next": (HYBRID, "has an operation before o_proj of layer 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_value_paths_are_refused(name: str, tmp_path: Path) -> None:
    config, sentence = REFUSED[name]
    source = write(config, tmp_path / "model")
    model = load(source, torch.float32)
    for key, parameter in model.named_parameters():
        if "sub_norm" in key:
            nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(source)
    with pytest.raises(UnsupportedModelError, match=sentence):
        write_folded(str(source), Stub(fingerprint(source)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Stub:
    """A policy with a basis of any model, for those that no statistics can be written of."""

    selector, formats, reading, capabilities = None, None, None, Capabilities()

    def __init__(self, fitted_to: str) -> None:
        self.fitted_to, self.basis = fitted_to, self

    @property
    def value_fingerprint(self) -> str:
        return "0123456789abcdef"

    def value_rotation(self, layer: int) -> object:
        raise AssertionError("the model is refused before")

    def bind(self, layer: int, shape: object) -> None:
        pass


def test_the_stub_is_of_the_protocol() -> None:
    assert isinstance(Stub("").basis, FoldsValues)


@pytest.mark.parametrize("attribute", ["v_proj", "o_proj"])
def test_shared_projections_are_refused(made, tmp_path: Path, monkeypatch, attribute: str) -> None:
    source, policy, _ = made(LLAMA)

    def shared(folder: Path, name: str):
        model = load(folder, torch.float32)
        layers = model.model.layers
        setattr(layers[1].self_attn, attribute, getattr(layers[0].self_attn, attribute))
        return model

    monkeypatch.setattr(module, "load_weights", shared)
    with pytest.raises(UnsupportedModelError, match=r"share \d parameters that a basis changes"):
        write_folded(str(source), parse(policy), tmp_path / "out")


def test_weights_that_are_not_those_of_the_files_are_refused(
    made, tmp_path: Path, monkeypatch
) -> None:
    source, policy, _ = made(LLAMA)

    def changed(folder: Path, name: str):
        model = load(folder, torch.float32)
        with torch.no_grad():
            model.model.layers[1].self_attn.o_proj.weight[3, 4] += 1
        return model

    monkeypatch.setattr(module, "load_weights", changed)
    with pytest.raises(UnsupportedModelError, match=r"layers.1.self_attn.o_proj.weight is not a"):
        write_folded(str(source), parse(policy), tmp_path / "out")


@pytest.mark.model
def test_the_real_model_answers_as_before(tmp_path: Path) -> None:
    from kv_transformers.models import model_folder

    source = model_folder()
    policy = f"zack:file={write_statistics(source, tmp_path / 'zack')},keep=75%"
    write_folded(None, parse(policy), tmp_path / "out")
    want, found = logits(load(source, torch.float32)), logits(load(tmp_path / "out", torch.float32))
    # Both weights are rounded to bfloat16.
    assert float((found - want).norm() / want.norm()) < 0.05
    before, after = load(source, torch.float32), load(tmp_path / "out", torch.float32)
    old, new = (CompressedCache(each, policy) for each in (before, after))
    want, found = logits(before, old), logits(after, new)
    assert float((found - want).norm() / want.norm()) < 0.05
    assert new.memory().vector_bytes == old.memory().vector_bytes
