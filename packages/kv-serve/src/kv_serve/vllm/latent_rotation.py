"""A check of the rotary embedding that vLLM applies to latents on a CPU."""

import torch
from torch.nn import Module
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

from kv_serve.vllm.config import UnservableError


def check_rotation(model: Module | None, dtype: torch.dtype) -> None:
    """Raise if equal vectors at equal positions are rotated differently.

    vLLM's kernel for CPUs takes the distance between tokens from the last but one dimension, which
    is that of heads in latent attention. So it rotates few of the vectors, by the positions of
    others, and answers depend on what else is in a batch, with a policy or without. Compiled models
    and YaRN for DeepSeek use other code.

    Args:
        model: the outermost module around the attention layers; None if there is none.
        dtype: the model's.

    Raises:
        UnservableError: the message has the option that avoids the kernel.
    """
    found = [] if model is None else model.modules()
    layers = (each for each in found if isinstance(each, MultiHeadLatentAttentionWrapper))
    ropes = {each.rotary_emb: each.qk_rope_head_dim for each in layers}
    for rope, dim in ropes.items():
        if rope is None:  # keys without positions
            continue
        ones = torch.ones(2, 2, 2 * dim, dtype=dtype)
        query, key = ones[..., dim:], ones.clone()[:, 0, dim:].unsqueeze(1)
        vectors = rope(torch.tensor([1, 1]), query, key)
        if not all(torch.equal(each[0], each[1]) for each in vectors):
            raise UnservableError(
                "this vLLM rotates the vectors of this model's latent attention (MLA) wrongly on a "
                "CPU, with a kv_policy or without; set compilation_config to "
                '{"custom_ops": ["all", "-rotary_embedding"]}, or remove enforce_eager'
            )
