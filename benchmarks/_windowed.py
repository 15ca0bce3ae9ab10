"""SmolLM2 with a sliding window in some layers: a real hybrid, without training."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kv_policy.files import write_whole
from kv_transformers.models import model_folder

WINDOW: Final = 1024
# A class of each host that has both kinds of layers and the weights' names of Llama.
HOSTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "transformers": {"architectures": ["MinistralForCausalLM"], "model_type": "ministral"},
    "vllm": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
}


def windowed(host: str, first: int, window: int = WINDOW) -> Path:
    """Write the folder of a model for a host, and return it; its weights are links.

    Args:
        host: a key of HOSTS.
        first: 0 or 1, the first layer with a window; every second one from there has it, too.
        window: tokens that such a layer attends to.
    """
    source = model_folder()
    folder = source.with_name(f"{source.name}-window{window}-from{first}-{host}")
    folder.mkdir(exist_ok=True)
    for file in source.iterdir():
        link = folder / file.name
        if file.name != "config.json" and not link.exists():
            link.symlink_to(file)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    layers = range(config["num_hidden_layers"])
    kinds = ["sliding_attention" if i % 2 == first else "full_attention" for i in layers]
    config |= {"layer_types": kinds, "sliding_window": window, **HOSTS[host]}
    write_whole(folder / "config.json", json.dumps(config, indent=1).encode())
    return folder
