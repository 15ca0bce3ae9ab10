"""Tiny random models, one per architecture that transformers generates text with."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from tools.models.sizes import tiny
from tools.models.variants import VARIANTS, given

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MOST_PARAMETERS: Final = 12_000_000
KEPT: Final = ("norm", "A_log", "dt_bias", "rotary", "inv_freq")  # as the model initializes them


def architectures() -> list[str]:
    """Return the model types of transformers with a causal language model, or one that sees."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


def with_variants(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return each architecture, and after it each of its variants, by their names."""
    return [(name, variant) for name in names for variant in ("", *VARIANTS.get(name, ()))]


def config_of(name: str, variant: str = "") -> "PreTrainedConfig":
    """Return the small configuration of an architecture."""
    from transformers import CONFIG_MAPPING

    return tiny(CONFIG_MAPPING[name], given(name, variant))


def class_of(name: str) -> Any:
    """Return the auto class that builds a model of an architecture."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    sees = name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def parameters(name: str, config: "PreTrainedConfig") -> int:
    """Return the number of parameters of a model without building it."""
    with torch.device("meta"):
        model = class_of(name).from_config(config, dtype=torch.float32)
    return sum(each.numel() for each in model.parameters())


def build(name: str, variant: str = "") -> "PreTrainedModel":
    """Return a small random model in float32, the same each time.

    Raises:
        ValueError: it is not small.
        Exception: transformers cannot build it.
    """
    config = config_of(name, variant)
    count = parameters(name, config)
    if count > MOST_PARAMETERS:
        raise ValueError(f"has {count:,} parameters with its small configuration")
    torch.manual_seed(1)
    model: PreTrainedModel = class_of(name).from_config(config, dtype=torch.float32)
    _spread(model)
    if model.can_generate():  # no token ends an answer, nor is one forced at its end
        model.generation_config.eos_token_id = None
        model.generation_config.forced_eos_token_id = None
        model.generation_config.pad_token_id = 0
    return model.float().eval()


@torch.no_grad()
def _spread(model: "PreTrainedModel") -> None:
    """Replace weights by others that make attention peaked and tokens differ."""
    random = torch.Generator().manual_seed(3)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=random)

    for name, weight in model.named_parameters():
        if any(word in name for word in KEPT):
            continue
        if "sink" in name:
            weight.copy_(normal(weight) + 1)
        elif weight.dim() == 1:
            if name.endswith("bias"):
                weight.copy_(0.1 * normal(weight))
        elif weight.dim() == 2 and any(word in name for word in ("embed", "wte", "lm_head")):
            weight.copy_(0.5 * normal(weight))
        elif "conv" not in name and weight.dim() < 4:
            weight.copy_(1.2 / math.sqrt(weight.shape[-1]) * normal(weight))
