"""Files of a tiny model for tests of loading models, and ways to damage them."""

from pathlib import Path
from typing import Final

import numpy as np
import pytest

from kv_transformers.models import ModelError, load_model

SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE: Final = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def alphabet() -> list[str]:
    """Map each byte to a printable letter, as byte-level tokenizers do."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain}
    letters |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def write_gguf(path: Path, *, poison: bool = False) -> Path:
    """Write two layers of random float32 weights and a byte tokenizer."""
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


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-9] ^= 0x40
    file.write_bytes(data)


def refusal(name: str | None, **options: str) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(name, **options)
    return str(caught.value)
