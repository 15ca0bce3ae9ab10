"""Linear layers that read prompts in float32, where torch has no fast bfloat16.

On such a processor torch sums products of bfloat16 in float32, too, one by one, and a prompt takes
several times as long. Sums come in another order; what a layer gives is rounded to bfloat16 as
before. Single tokens stay as they are: there memory is what takes the time.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

WITHOUT_BFLOAT16 = frozenset({"AVX2", "DEFAULT"})


def needed() -> bool:
    """Whether torch has no fast bfloat16 here."""
    return torch.backends.cpu.get_cpu_capability() in WITHOUT_BFLOAT16


def widen(model: Any) -> None:
    """Let every linear layer without a bias keep its weight in float32, too, and read by it."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is None:
            module.forward = partial(_read, module.weight, module.weight.detach().float())


def _read(weight: Tensor, wide: Tensor, x: Tensor) -> Tensor:
    """Multiply x (..., L, n) by a weight (m, n)."""
    if x.shape[-2] == 1:
        return linear(x, weight)
    return linear(x.float(), wide).to(x.dtype)
