"""Helpers of tests inside vLLM: skipping without vLLM, and a tiny model for engines."""

import importlib.util
import json
from collections.abc import Collection, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from kv_serve.vllm.versions import installed, minor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NO_TORCHVISION: Final = (5, 19)  # transformers reads pictures without it from here on
# The gate of SmolLM2 was calibrated with the tokenizer that transformers makes of GGUF since 5.18.
NEEDS_TOKENIZER: Final = pytest.mark.skipif(
    (minor(version("transformers")) or (5, 18)) < (5, 18),
    reason="transformers before 5.18 makes another tokenizer of a GGUF file",
)
TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def skip_without_vllm(
    items: Iterable[pytest.Item], folder: Path, but: Collection[str] = ()
) -> None:
    """Skip the tests of a folder if vLLM is not installed; allow any warning of vLLM.

    Args:
        items: the collected tests.
        folder: the folder of tests that need vLLM.
        but: files there that do not need it.
    """
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if item.path.parent != folder or item.path.name in but:
            continue
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        if missing:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed; `nox -s vllm` has one"))


def write_config(
    folder: Path, architecture: str = "LlamaForCausalLM", kind: str = "llama", **more: Any
) -> None:
    """Write the configuration of a tiny model; its weights are drawn when it is loaded."""
    config = TINY | {"architectures": [architecture], "model_type": kind} | more
    (folder / "config.json").write_text(json.dumps(config))


def write_weights(
    folder: Path, architecture: str = "LlamaForCausalLM", kind: str = "llama", **more: Any
) -> None:
    """Write a tiny model with float32 weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    drawn = {"initializer_range": 0.1, "torch_dtype": "float32"}
    write_config(folder, architecture, kind, **drawn, **more)
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(folder)))
    made.save_pretrained(folder)


def write_eagle(model: Path, folder: Path) -> None:
    """Write an EAGLE head for a tiny model: its first layer, on the embedding of the new token."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(model)
    layer = made.model.layers[0].state_dict()
    found = {f"layers.0.{name}": x.clone() for name, x in layer.items()}
    del found["layers.0.input_layernorm.weight"]  # EAGLE has none
    eye = torch.eye(made.config.hidden_size)
    found["fc.weight"] = torch.cat((eye, torch.zeros_like(eye)), 1)  # the hidden state is left out
    save_file(found, folder / "model.safetensors")
    write_config(folder, num_hidden_layers=1, torch_dtype="float32")


def write_eagle3(model: Path, folder: Path) -> None:
    """Write an EAGLE-3 head for a tiny model: its first layer, after what that layer returned."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(model)
    layer = made.model.layers[0].state_dict()
    found = {f"midlayer.{name}": x.clone() for name, x in layer.items()}
    for each in ("q", "k", "v"):  # of the new token's embedding, and of the hidden state
        name = f"midlayer.self_attn.{each}_proj.weight"
        found[name] = torch.cat((found[name], torch.zeros_like(found[name])), 1)
    size = made.config.hidden_size
    found["midlayer.hidden_norm.weight"] = torch.ones(size)
    found["norm.weight"] = torch.ones(size)
    found["fc.weight"] = torch.cat((torch.zeros(size, size), torch.eye(size)), 1)
    found["lm_head.weight"] = made.lm_head.weight.detach().clone()
    save_file(found, folder / "model.safetensors")
    read = {"eagle_aux_hidden_state_layer_ids": [0, 1]}  # what enters both layers of the model
    more = {"torch_dtype": "float32", "tie_word_embeddings": False, "eagle_config": read}
    write_config(folder, num_hidden_layers=1, **more)


def write_next_token_heads(folder: Path) -> None:
    """Write a tiny GLM-4.5 with float32 weights, whose last layer predicts one token more (MTP)."""
    import torch
    from safetensors.torch import load_file, save_file

    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
    groups = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    sizes = {"moe_intermediate_size": 64, "tie_word_embeddings": False}
    more = experts | groups | sizes | {"num_nextn_predict_layers": 1}
    write_weights(folder, "Glm4MoeForCausalLM", "glm4_moe", **more)
    found = load_file(folder / "model.safetensors")
    here, there = "model.layers.1.", "model.layers.2."
    again = {name.replace(here, there): x.clone() for name, x in found.items() if here in name}
    size = TINY["hidden_size"]
    eye, one = torch.eye(size), torch.ones(size)
    again[f"{there}eh_proj.weight"] = torch.cat((eye, 0.5 * eye), 1)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        again[f"{there}{name}.weight"] = one.clone()
    again[f"{there}shared_head.head.weight"] = found["lm_head.weight"].clone()
    again[f"{there}embed_tokens.weight"] = found["model.embed_tokens.weight"].clone()
    save_file(found | again, folder / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are single bytes, but for the first and last of a sequence."""
    tokenizer_of().save_pretrained(folder)


def tokenizer_of(*more: str) -> "PreTrainedTokenizerFast":
    """Return a tokenizer of bytes, with further special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {"<unk>": 0, "<s>": TINY["bos_token_id"], "</s>": TINY["eos_token_id"]}
    own |= {each: len(own) + i for i, each in enumerate(more)}
    letters = alphabet[: TINY["vocab_size"] - len(own)]  # a few bytes have no room
    names = own | {each: len(own) + i for i, each in enumerate(letters)}
    raw = Tokenizer(models.BPE(vocab=names, merges=[], unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=raw, **special, extra_special_tokens=[*more])


def write_experts(folder: Path) -> None:
    """Write a tiny Qwen3-MoE with float32 weights: two of four experts read each token."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    write_weights(folder, "Qwen3MoeForCausalLM", "qwen3_moe", **experts, decoder_sparse_step=1)


def write_vision(folder: Path) -> None:
    """Write a tiny Idefics3 with float32 weights and its processor: a picture has 16 tokens.

    A test of it is skipped where transformers reads its pictures with torchvision alone.
    """
    import torch
    import transformers
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
    )

    side, patch, shuffled, image = 64, 8, 2, "<image>"
    around = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    longest = {"longest_edge": side}
    sizes = {"size": longest, "max_image_size": longest, "do_image_splitting": False}
    older = minor(transformers.__version__) or NO_TORCHVISION
    if older < NO_TORCHVISION and importlib.util.find_spec("torchvision") is None:
        pytest.skip("transformers before 5.19 reads pictures with torchvision, which is missing")
    if (minor(installed() or "") or (0, 31)) < (0, 31):
        pytest.skip("vLLM before 0.31 takes the pictures of this model for padding")
    reader = Idefics3ImageProcessorPil(**sizes)
    tokenizer = tokenizer_of(image, *around)
    text = {name: value for name, value in TINY.items() if name != "torch_dtype"}
    vision = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": side,
        "patch_size": patch,
        "initializer_range": 0.1,
    }
    config = Idefics3Config(
        text_config=text | {"model_type": "llama", "initializer_range": 0.1, "pad_token_id": 0},
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids(image),
        scale_factor=shuffled,
        pad_token_id=0,
        tie_word_embeddings=True,
        dtype="float32",
    )
    torch.manual_seed(0)
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    tokens = (side // patch // shuffled) ** 2
    Idefics3Processor(reader, tokenizer, tokens).save_pretrained(folder)


def write_adapter(model: Path, folder: Path, seed: int, rank: int = 8) -> None:
    """Write a random LoRA adapter, and in `merged` the model with its weights added."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    made, targets, found = AutoModelForCausalLM.from_pretrained(model), ["q_proj", "v_proj"], {}
    for name, part in made.named_modules():
        if name.rpartition(".")[2] not in targets:
            continue
        down = 0.1 * torch.randn(rank, part.in_features)
        up = 0.5 * torch.randn(part.out_features, rank)
        found[f"base_model.model.{name}.lora_A.weight"] = down
        found[f"base_model.model.{name}.lora_B.weight"] = up
        part.weight.data += up @ down
    made.save_pretrained(folder / "merged")
    save_file(found, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
