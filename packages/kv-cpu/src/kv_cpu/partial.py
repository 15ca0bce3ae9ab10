"""Attention over some of the tokens, and the largest probability that each of them receives."""

import torch
from jaxtyping import Float
from torch import Tensor

from kv_attention import AttentionInputs, Partial
from kv_cpu import prompt
from kv_cpu.arguments import MOST_DIM, MOST_GROUP
from kv_cpu.library import chosen
from kv_policy.described import NUMBERS


def attend_partly(inputs: AttentionInputs) -> Partial | None:
    """Compute attention over all parts; None if `prompt.declined` returns a reason.

    The output is in the dtype of the queries, the log-sum-exp in float32.

    Raises:
        RuntimeError: a table names a page outside its pool, or a length is out of range.
    """
    return prompt.attend_to_all(inputs) if prompt.declined(inputs) is None else None


def largest_probabilities(
    q: Float[Tensor, "B H G L D"],
    lse: Float[Tensor, "B H G L"],
    key: Float[Tensor, "B H S D"],
    scale: float,
    isa: str | None = None,
) -> Float[Tensor, "B H S"] | None:
    """Return the largest probability of each token; None if `declined` returns a reason.

    Logits are computed again from the log-sum-exp, in float32; bfloat16 numbers are multiplied
    directly where the processor does that, which is exact.
    """
    if declined(q, lse, key, isa) is not None:
        return None
    found: Tensor = torch.ops.kv_cpu.largest(q, lse.contiguous(), key, scale, isa or chosen())
    return found


def declined(
    q: Float[Tensor, "B H G L D"],
    lse: Float[Tensor, "B H G L"],
    key: Float[Tensor, "B H S D"],
    isa: str | None = None,
) -> str | None:
    """Return why torch computes the largest probabilities; None if native code does."""
    if (isa or chosen()) == "plain":
        return "native products need AVX2 or more, and this is `plain`"
    if lse.dtype != torch.float32:
        return f"log-sum-exp in {lse.dtype}; native code computes in float32"
    if q.device.type != "cpu":
        return f"tensors on {q.device.type}"
    if any(x.dtype not in NUMBERS for x in (q, key)):
        return f"queries in {q.dtype} and keys in {key.dtype}; native code computes in float32"
    if torch.is_grad_enabled() and (q.requires_grad or key.requires_grad):
        return "gradients are required"
    if not 0 < q.shape[2] <= MOST_GROUP or not 0 < q.shape[4] <= MOST_DIM:
        return f"{q.shape[2]} query heads of a KV head, of {q.shape[4]} dimensions"
    if key.stride(-1) != 1 and key.shape[-1] != 1:
        return "keys whose numbers are not consecutive"
    return None
