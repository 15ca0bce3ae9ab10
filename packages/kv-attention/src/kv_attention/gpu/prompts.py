"""Prompts on a GPU: a launch for each part, each going on with what was found of those before."""

from collections.abc import Sequence

import torch
import triton
from jaxtyping import Float, Int
from torch import Tensor

from kv_attention.gpu.arguments import Part, rows_of
from kv_attention.gpu.prompt import prompt_kernel
from kv_attention.gpu.steps import LOG2E
from kv_attention.gpu.tuning import Machine, tiling
from kv_attention.partial import Partial


def attend_to_all(
    q: Float[Tensor, "B H G L D"],
    position: Int[Tensor, "B L"],
    parts: Sequence[Part],
    value_dim: int,
    scale: float,
    machine: Machine,
) -> Partial:
    """Attend to all parts; 0 and -inf for a query that is padding or sees nothing.

    The output is in the dtype of the queries, the log-sum-exp in float32.
    """
    batch, heads, group, length, _ = q.shape
    found = Partial.empty(q, value_dim)
    position = position.contiguous()
    for i, part in enumerate(parts):
        form = tiling(machine, "prompt", part, q.dtype)
        rows = max(16, min(form.queries, triton.next_power_of_2(group * length)))
        into = found.out
        if i == len(parts) - 1:
            into = torch.empty_like(found.out, dtype=q.dtype)
        prompt_kernel[(triton.cdiv(group * length, rows), batch * heads)](
            q,
            rows_of(q),
            q.stride(3),
            position,
            found.out,
            found.lse,
            into,
            found.lse,
            part.length,
            part.tokens,
            length,
            heads,
            scale * LOG2E,
            CONTINUES=i > 0,
            GROUP=group,
            ROWS=rows,
            BLOCK=form.block,
            WIDE=1024,
            VALUE=part.value,
            STAGES=form.stages,
            num_warps=form.warps,
            **part.constants(q.dtype, interpreted=machine.interpreted, asm=machine.asm),
        )
        found = Partial(into, found.lse)
    return Partial(found.out.to(q.dtype), found.lse)
