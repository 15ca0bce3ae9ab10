"""Tiny values for the fields of a transformers configuration, whatever its architecture.

A field's name says what it sizes, across architectures. Where a name is used otherwise, or sizes
must match one another, `exceptions.py` states the values.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

VOCABULARY: Final = 192
SPECIAL: Final = 32  # ids below are of padding, pictures and the like; prompts have the others
HIDDEN: Final = 64
HEADS: Final = 4
KV_HEADS: Final = 2
DIM: Final = 16
EXPERTS: Final = 4
WINDOW: Final = 8
POSITIONS: Final = 256
MOST_LAYERS: Final = 8

LAYERS: Final = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_blocks",
)
ENCODER_LAYERS: Final = ("encoder_layers", "num_encoder_layers")  # as many as of the decoder
_SIZES: Final[Sequence[tuple[int, tuple[str, ...]]]] = (
    (
        VOCABULARY,
        (
            "vocab_size",
            "vocab_size_per_layer_input",
            "unpadded_vocab_size",
        ),
    ),
    (
        HIDDEN,
        (
            "hidden_size",
            "d_model",
            "n_embd",
            "embed_dim",
            "dim",
            "emb_dim",
            "embedding_dim",
            "embedding_size",
            "input_embedding_size",
            "output_embedding_size",
            "word_embed_proj_dim",
            "backbone_hidden_size",
            "output_hidden_size",
            "out_hidden_size",
            "text_hidden_size",
            "projection_dim",
            "projection_size",
            "output_dim",
            "lru_width",
            "intermediate_size",
            "intermediate_size_mlp",
            "dense_intermediate_size",
            "ffn_dim",
            "ffn_hidden_size",
            "dim_ff",
            "dff",
            "d_ff",
            "d_inner",
            "decoder_ffn_dim",
            "encoder_ffn_dim",
            "feed_forward_size",
            "moe_intermediate_size",
            "expert_ffn_hidden_size",
            "shared_expert_intermediate_size",
            "shared_experts_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "moe_hidden_size",
            "projector_hidden_size",
            "projection_intermediate_size",
            "router_hidden_size",
            "hidden_size_global",
            "mlp_dim",
            "text_embed_dim",
            "projector_input_dim",
            "projector_output_dim",
            "vision_output_dim",
            "encoder_hidden_size",
            "vision_hidden_size",
            "pronunciation_vocab_size",
            "pronunciation_embed_dim",
            "shape_vocab_size",
            "shape_embed_dim",
            "shared_intermediate_size",
        ),
    ),
    (
        HEADS,
        (
            "num_attention_heads",
            "attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "decoder_attention_heads",
            "encoder_attention_heads",
            "num_decoder_attention_heads",
            "num_encoder_attention_heads",
            "swa_num_attention_heads",
            "linear_num_value_heads",
            "linear_num_heads",
            "qk_head_dim_heads",
        ),
    ),
    (
        KV_HEADS,
        (
            "num_key_value_heads",
            "num_kv_heads",
            "swa_num_key_value_heads",
            "num_global_key_value_heads",
            "linear_num_key_heads",
            "index_n_heads",
            "encoder_layers",
            "num_encoder_layers",
            "depth",
            "n_mamba_heads",
        ),
    ),
    (
        DIM,
        (
            "head_dim",
            "swa_head_dim",
            "d_kv",
            "d_head",
            "dim_head",
            "kv_channels",
            "attention_head_size",
            "linear_head_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "q_lora_rank",
            "kv_lora_rank",
            "o_lora_rank",
            "qk_nope_head_dim",
            "v_head_dim",
            "swa_v_head_dim",
            "index_head_dim",
            "mamba_d_state",
            "mamba_d_head",
            "mamba_head_dim",
            "mamba_headdim",
            "mamba_dt_rank",
            "state_size",
            "ssm_state_size",
            "time_step_rank",
            "ple_embed_dim",
            "gated_norm_rank",
            "loop_gate_rank",
            "hc_lowrank",
        ),
    ),
    (
        WINDOW,
        (
            "sliding_window",
            "sliding_window_size",
            "window_size",
            "attention_window_size",
            "attention_chunk_size",
            "local_attention",
            "local_attention_window_len",
            "keep_window_size",
            "rel_extent",
            "index_topk",
            "chunk_size",
            "mamba_chunk_size",
            "block_size",
            "qk_rope_head_dim",
            "rotary_dim",
            "laurel_rank",
            "hidden_size_per_layer_input",
            "mamba_n_heads",
            "mamba_num_heads",
            "index_block_size",
        ),
    ),
    (
        EXPERTS,
        (
            "num_experts",
            "n_routed_experts",
            "num_local_experts",
            "moe_num_experts",
        ),
    ),
    (
        2,
        (
            "num_experts_per_tok",
            "num_experts_per_token",
            "moe_topk",
            "moe_top_k",
            "moe_k",
            "top_k_experts",
            "max_window_layers",
            "num_nextn_predict_layers",
        ),
    ),
    (
        1,
        (
            "n_group",
            "topk_group",
            "num_expert_group",
            "n_shared_experts",
            "num_shared_experts",
            "moe_num_shared_experts",
            "mamba_n_groups",
            "mamba_ngroups",
            "n_groups",
            "first_k_dense_replace",
            "num_dense_layers",
        ),
    ),
    (2 * HIDDEN, ("mamba_d_ssm", "attention_hidden_size")),
    (2 * DIM, ("global_head_dim",)),
    (
        POSITIONS,
        (
            "max_position_embeddings",
            "n_positions",
            "n_ctx",
            "max_seq_len",
            "max_source_positions",
            "max_target_positions",
            "context_length",
        ),
    ),
    (32, ("image_size", "base_channels", "output_channels", "latent_channels")),
    (8, ("patch_size",)),
)
_BY_NAME: Final = {name: size for size, names in _SIZES for name in names}
_ALWAYS: Final = frozenset(
    {"num_key_value_heads", "head_dim"}
)  # set even where None stands for all
_FIXED: Final[Mapping[str, object]] = {
    "use_cache": True,
    "is_decoder": True,
    "tie_word_embeddings": False,  # a tied one predicts the token that it reads
}
_TOKENS: Final[Mapping[str, int]] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tiny(cls: "type[PreTrainedConfig]", given: Mapping[str, Any]) -> "PreTrainedConfig":
    """Return a small configuration of a class.

    Args:
        cls: the class.
        given: values that replace those found by name; those of a configuration inside by its name.

    Raises:
        Exception: the class rejects the values.
    """
    return cls(**arguments(cls, given))


def arguments(
    cls: "type[PreTrainedConfig]", given: Mapping[str, Any], *, sees: bool = False
) -> dict[str, Any]:
    """Return the arguments of a small configuration: small sizes, and each type of layer.

    Args:
        cls: the class.
        given: as for `tiny`.
        sees: whether it is inside the configuration of a model that sees, whose tokens may have
            positions of three axes.

    Raises:
        Exception: the class rejects the values.
    """
    try:
        default = cls(**given)
    except Exception:  # what is given fits small sizes only
        default = cls()
    values = dict(vars(default))  # some, read as attributes, raise where layers differ
    values |= {name: values.get(stored) for name, stored in cls.attribute_map.items()}
    fields = {field.name for field in dataclasses.fields(cls)}
    inner = {name: values[name] for name in cls.sub_configs if values.get(name) is not None}
    found: dict[str, Any] = {
        name: arguments(type(config), given.get(name, {}), sees=True)
        | {"model_type": config.model_type}
        for name, config in inner.items()
    }
    free = iter(range(3, SPECIAL))
    for name in sorted(fields - found.keys()):
        value = values.get(name)
        size = _rope(value, sees) if name == "rope_parameters" else _size(name, value, free)
        if size is not None:
            found[name] = size
    if values.get("kv_lora_rank"):
        found["num_key_value_heads"] = HEADS  # every query head reads its own part of the latent
        found.pop("head_dim", None)
    found |= _layers({name: values.get(name) for name in sorted(fields)})
    return found | {name: value for name, value in given.items() if name not in inner}


def _size(name: str, value: object, free: Iterator[int]) -> object:
    """Return the small value of a field, or None to leave it as it is."""
    if name in _FIXED:
        return _FIXED[name]
    if name in _TOKENS:
        return _TOKENS[name]
    if name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
        return next(free)
    if name in _BY_NAME and (name in _ALWAYS or (type(value) is int and value > 0)):
        return _BY_NAME[name]
    return None


def _rope(parameters: object, sees: bool) -> dict[str, Any] | None:
    """Return rotary parameters for small heads, with those of each type of layer."""
    if not isinstance(parameters, Mapping) or not parameters:
        return None
    if all(isinstance(value, Mapping) for value in parameters.values()):
        return {name: _rope(value, sees) for name, value in parameters.items()}
    if not sees and "mrope_section" not in parameters:
        return dict(parameters)
    # Of sections of height, width and time, the first two are equal; of time first, any will do.
    pairs = int(DIM * (parameters.get("partial_rotary_factor") or 1)) // 2
    third = (pairs + 1) // 3
    return {**parameters, "mrope_section": [third, third, pairs - 2 * third]}


def _layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of layers and what lists say of each, with every kind of layer twice."""
    name = next((each for each in LAYERS if isinstance(values.get(each), int)), None)
    if name is None:
        return {}
    count = values[name]
    lists = {
        field: value
        for field, value in values.items()
        if isinstance(value, list | tuple) and len(value) == count > 2
    }
    if not lists:
        return {name: 3} | {each: 3 for each in ENCODER_LAYERS if each in values}
    seen: dict[str, int] = {}
    chosen = []
    for index, kind in enumerate(map(repr, zip(*lists.values(), strict=True))):
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= 2:
            chosen.append(index)
    kept = chosen[:MOST_LAYERS]
    return {name: len(kept), **{key: [value[i] for i in kept] for key, value in lists.items()}}
