"""The inputs that no compiled backend supports."""

import torch

from kv_attention.inputs import AttentionInputs
from kv_policy.described import NUMBERS, described


def refused(
    inputs: AttentionInputs,
    most_key: int,
    most_value: int,
    *,
    blocks: bool = False,
    planes: bool = False,
) -> str | None:
    """Return why compiled kernels do not support a pass; None if they do.

    The reason is the dtype, the dimensions or the codec.

    Args:
        inputs: the pass.
        most_key: the maximum dimension of keys that the kernels support.
        most_value: that of values.
        blocks: whether they support formats that encode several tokens together.
        planes: whether they support codes of 3 bits, and codes that stand for levels.
    """
    q = inputs.q
    if q.dtype not in NUMBERS:
        return f"queries in {q.dtype}; compiled kernels compute in float32"
    sinks = inputs.sinks
    if torch.is_grad_enabled() and (q.requires_grad or (sinks is not None and sinks.requires_grad)):
        return "gradients are required"
    if inputs.softcap is not None and not 1e-30 <= inputs.softcap <= 1e30:
        return f"a bound of {inputs.softcap} of the logits; kernels support 1e-30 to 1e30"
    if q.shape[4] > most_key or inputs.value_dim > most_value:
        return f"keys of more than {most_key} dimensions, or values of more than {most_value}"
    for part in inputs.pages:
        reason = described(part.layout, blocks=blocks, planes=planes).declined
        if reason is not None:
            return reason
    if any(x.dtype not in NUMBERS for tokens in inputs.dense for x in (tokens.key, tokens.value)):
        return "dense tokens in float64"
    return None
