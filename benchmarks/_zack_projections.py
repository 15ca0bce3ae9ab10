"""The projections of a model before and after a basis is folded into them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from _timing import Work, timed
from torch import Tensor, nn

from kv_policy import KVPolicy
from kv_runtime import Bases
from kv_transformers import Fold, cache_shape
from kv_transformers.folded import Packing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Layer = dict[str, nn.Linear]
linear = nn.Linear.forward  # a folded projection refuses a pass without a cache of its policy


def large_layer() -> "PreTrainedModel":
    """One layer with the attention of Llama-3.1-8B; its weights are random, the rest is small."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8,
        hidden_size=4096,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def projection_rows(
    name: str,
    model: "PreTrainedModel",
    policies: dict[tuple[str, float], KVPolicy],
    tokens: int,
    rounds: int,
) -> list[dict[str, object]]:
    """Time the projections of all layers, as they are and folded, turn by turn.

    Args:
        name: of the model.
        model: whose layers; as it was when this returns.
        policies: what to fold, by the kind of ranks and the rate.
        tokens: of one sequence.
        rounds: of which the median is taken.
    """
    x = torch.randn(1, tokens, model.config.hidden_size).to(model.dtype)
    with torch.inference_mode():
        return [
            {
                "kind": "projections",
                "model": name,
                "layers": model.config.num_hidden_layers,
                "tokens": tokens,
                "ranks": ranks,
                "rate": rate,
                "rounds": rounds,
                **_compared(model, policy, x, rounds),
            }
            for (ranks, rate), policy in policies.items()
        ]


def _compared(
    model: "PreTrainedModel", policy: KVPolicy, x: Tensor, rounds: int
) -> dict[str, object]:
    old = _projections(model)
    with Fold(model, policy) as fold:
        new, packing = _projections(model), fold.state.packing
    assert policy.basis is not None
    bases = Bases.of(policy.basis, cache_shape(model), torch.device("cpu"))
    turns = timed(
        {
            "value_output": _values(old, x),
            "value_output_folded": _values(new, x),
            "query_key": _both(old, x),
            "rotation": _rotation(bases, x),
            "packing": _packing(packing, bases, x),
        },
        rounds,
    )
    weights = [
        sum(w[n].weight.nbytes for w in ws for n in ("v_proj", "o_proj")) for ws in (old, new)
    ]
    old_values, new_values = ("value_output",), ("value_output_folded",)
    online = "rotation", "packing"
    return {
        **{f"{name}_s": turns.median(name) for name in turns.seconds},
        "projection_ratio": turns.ratio(new_values, old_values),
        "projection_ratio_with_packing": turns.ratio((*new_values, "packing"), old_values),
        "rotation_over_query_key": turns.ratio(("rotation",), ("query_key",)),
        "all_projections_ratio": turns.ratio(
            (*new_values, "query_key", *online), (*old_values, "query_key")
        ),
        "memory_ratio": weights[1] / weights[0],
    }


def _projections(model: "PreTrainedModel") -> list[Layer]:
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    found = [module for module in model.modules() if hasattr(module, "o_proj")]
    return [{name: getattr(module, name) for name in names} for module in found]


def _values(layers: Sequence[Layer], x: Tensor) -> Work:
    """The value projection, and the output projection of as many random numbers as it reads."""
    outs = [torch.randn(*x.shape[:2], w["o_proj"].in_features).to(x.dtype) for w in layers]

    def work() -> None:
        for layer, out in zip(layers, outs, strict=True):
            linear(layer["v_proj"], x)
            linear(layer["o_proj"], out)

    return work


def _both(layers: Sequence[Layer], x: Tensor) -> Work:
    def work() -> None:
        for layer in layers:
            linear(layer["q_proj"], x)
            linear(layer["k_proj"], x)

    return work


def _rotation(bases: Bases, x: Tensor) -> Work:
    """Queries and keys of all layers into their bases."""
    stored, dim = bases.stored, max(m.matrix.shape[1] for m in bases.key_maps if m is not None)
    query = torch.randn(1, stored.kv_heads, stored.group, x.shape[1], dim).to(x.dtype)
    key = query[:, :, 0].contiguous()

    def work() -> None:
        for layer in range(stored.layers):
            bases.queries(layer, query)
            bases.keys(layer, key)

    return work


def _packing(packing: Sequence[Packing], bases: Bases, x: Tensor) -> Work:
    """Values from between the projections into the cache's form, and outputs back."""
    stored, count = bases.stored, x.shape[1]
    out = torch.randn(1, stored.kv_heads, stored.group, count, stored.value_dim).to(x.dtype)
    values = []
    for layer in packing:
        assert layer.values is not None  # there is a rotary embedding
        heads = -(-len(layer.values) // layer.dim)
        values.append(torch.randn(1, heads, count, layer.dim).to(x.dtype))

    def work() -> None:
        for layer, value in zip(packing, values, strict=True):
            layer.unpack(value)
            layer.pack(out)

    return work
