"""The kernel of a gate is compiled once for a model, whatever the prompt is like."""

import pytest
import torch

from gate_cases import gate_of, rope_of, view_of
from kernel_keys import compiled_keys
from kv_evict import gate_triton
from kv_policy import CacheShape


@pytest.mark.parametrize("dim", [64, 40])
def test_prompts(dim: int) -> None:
    shape = CacheShape(2, 2, 1, dim, dim, rope=rope_of(dim))
    network = gate_of(shape, 5).on(torch.device("cpu"))
    with compiled_keys() as keys:
        for layers, tokens in (([0], 16), ([1, 0], 33), ([0, 1], 1), ([1], 64)):
            view = view_of(shape, layers, tokens, torch.bfloat16)
            gate_triton.gate(view, network.linear, network.inner, network.outer)
    assert {name: len(found) for name, found in keys.items()} == {"gate_kernel": 1}
