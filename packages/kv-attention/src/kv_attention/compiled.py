"""The inputs that no compiled backend supports."""

import torch

from kv_attention.inputs import AttentionInputs
from kv_policy.described import NUMBERS, described


def refused(inputs: AttentionInputs, most_dim: int) -> str | None:
    """Return why compiled kernels do not support a pass; None if they do.

    The reason is the dtype, the dimensions or the codec.

    Args:
        inputs: the pass.
        most_dim: the maximum dimension of a vector that the kernels support.
    """
    q = inputs.q
    if inputs.softcap is not None or inputs.sinks is not None:
        return "a bound of the logits, or sinks"
    if q.dtype not in NUMBERS:
        return f"queries in {q.dtype}; compiled kernels compute in float32"
    if torch.is_grad_enabled() and q.requires_grad:
        return "gradients are required"
    if max(q.shape[4], inputs.value_dim) > most_dim:
        return f"vectors of more than {most_dim} dimensions"
    for part in inputs.pages:
        reason = described(part.layout).declined
        if reason is not None:
            return reason
    if any(x.dtype not in NUMBERS for tokens in inputs.dense for x in (tokens.key, tokens.value)):
        return "dense tokens in float64"
    return None
