"""What the small configuration of an architecture needs beside the sizes found by name."""

from collections.abc import Mapping
from typing import Any, Final

DEFAULT_ROPE: Final = {"rope_type": "default", "rope_theta": 10000.0}
TWO_KINDS: Final = ["sliding_attention", "full_attention"]
# Of six layers the last two read keys and values of earlier ones.
SHARING: Final = {"layer_types": TWO_KINDS * 3, "num_hidden_layers": 6, "num_kv_shared_layers": 2}
GEMMA3N: Final = {
    **SHARING,
    "intermediate_size": [64] * 6,
    "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
}
GEMMA4: Final = {"layer_types": TWO_KINDS * 2, "num_hidden_layers": 4, "global_head_dim": 32}
SWA_LATENT: Final = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 24,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
DOTS3: Final = {
    "head_dim": 24,
    "qk_nope_head_dim": 16,
    **{f"swa_{name}": size for name, size in SWA_LATENT.items()},
}
ASSISTANT: Final = {
    **GEMMA4,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": 4,
}
WINDOWS: Final = {"window_size": 32, "fullatt_block_indexes": [1]}
THINKER: Final = {"vision_start_token_id": 16, "vision_end_token_id": 17}
FULL_ROPE: Final = {"full_attention": DEFAULT_ROPE}
INDEXED: Final = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
CONVOLUTIONS: Final = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
EXCEPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "apertus1p5": {
        "audio_config": {"codebook_dim": 64, "hidden_size": 64, "codebook_size": 16},
        "vision_config": {"codebook_size": 16},
        "image_token_offset": 128,
        "audio_token_offset": 144,
    },
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "chameleon": {"vocabulary_map": {"<image>": 3}},
    "cohere2_vision": {"alignment_intermediate_size": 64},
    "cohere_compass": {"text_config": {"rope_parameters": FULL_ROPE}},
    "cohere_compass_text": {"rope_parameters": FULL_ROPE},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_ocr2": {
        "text_config": {
            "num_hidden_layers": 3,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "num_experts_per_tok": 2,
        }
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffusion_gemma": {
        "text_config": GEMMA4 | {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {
        "text_config": DOTS3,
        "audio_config": {"adapter_input_size": 64},
        "vision_config": {"adapter_in_dim": 64},
    },
    "dots3_note_text": DOTS3,
    "emu3": {"vocabulary_map": {"<image>": 3}},
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [32, 32]}},
    "exaone4_5": {"vision_config": WINDOWS},
    "falcon": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    "florence2": {
        "vision_config": {
            "depths": (1, 1, 1, 1),
            "embed_dim": (16, 16, 16, 64),
            "num_heads": (2, 2, 2, 2),
            "num_groups": (2, 2, 2, 2),
        }
    },
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma3n": {"text_config": GEMMA3N},
    "gemma3n_text": GEMMA3N,
    "gemma4": {"text_config": GEMMA4},
    "gemma4_assistant": {"text_config": ASSISTANT},
    "gemma4_text": GEMMA4,
    "gemma4_unified": {"text_config": GEMMA4},
    "gemma4_unified_assistant": {"text_config": ASSISTANT},
    "gemma4_unified_text": GEMMA4,
    "glm5_next": {"text_config": {"index_kpool": 2}},
    "glm_moe_dsa": {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [1],
        "downsample_rate": "1/2",
    },
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2},
    "hy_v4_vl": {
        "text_config": {
            "qk_rope_head_dim": 8,
            "rope_parameters": DEFAULT_ROPE | {"mrope_section": [2, 1, 1]},
        }
    },
    "hyperclovax_vision_v2": {"vision_config": WINDOWS},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"num_attention_heads_per_layer": [4] * 3, "num_hidden_layers": 3},
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": CONVOLUTIONS,
    "lfm2_vl": {"text_config": CONVOLUTIONS},
    "longcat_flash": {
        "zero_expert_num": 2,
        "num_layers": 2,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "qk_rope_head_dim": 8,
    },
    "mamba2": {"num_heads": 8, "hidden_size": 64},
    "ministral": {"num_hidden_layers": 4, "layer_types": TWO_KINDS * 2},
    "mistral": {"sliding_window": None},
    "mistral3": {"text_config": {"sliding_window": None}},
    "mistral4": {
        "num_key_value_heads": 4,
        "head_dim": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "rope_parameters": DEFAULT_ROPE | {"partial_rotary_factor": 1.0},
    },
    "mllama": {"text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1]}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "moshi": {"audio_encoder_config": {"codebook_size": 64}},
    "muse_spark": {"audio_config": {"hidden_sizes": (16, 16, 16, 64), "depths": (1, 1, 1, 1)}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "phi3": {"sliding_window": None},
    "qwen2_5_omni_thinker": {**THINKER, "vision_config": WINDOWS},
    "qwen2_5_vl": {"vision_config": WINDOWS},
    "qwen3_omni_moe_thinker": THINKER,
    "qwen4_exp": {"text_config": INDEXED},
    "qwen4_exp_text": INDEXED,
    "reformer": {"axial_pos_shape": (16, 16), "axial_pos_embds_dim": (16, 48)},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "vipllava": {"vision_feature_layer": (-2, -1)},
    "vision-encoder-decoder": {"decoder": {"add_cross_attention": True}},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
