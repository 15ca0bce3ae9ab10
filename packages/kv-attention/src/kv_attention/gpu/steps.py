"""Decode steps on a GPU: a launch to plan and one to attend for each part, and one to add up."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from jaxtyping import Float, Int
from torch import Tensor

from kv_attention.gpu.arguments import Part, padded, rows_of
from kv_attention.gpu.decode import combine_kernel, decode_kernel, plan_kernel
from kv_attention.gpu.tuning import Machine, tiling

LOG2E = 1.4426950408889634


class Decoded(NamedTuple):
    """A decode step; `logits` of each part are in powers of two, where they were asked for."""

    out: Float[Tensor, "B H G 1 Dv"]
    lse: Float[Tensor, "B H G"]
    logits: tuple[Float[Tensor, "R G _"], ...]


def decode(
    q: Float[Tensor, "B H G 1 D"],
    position: Int[Tensor, "B 1"],
    parts: Sequence[Part],
    value_dim: int,
    scale: float,
    machine: Machine,
    *,
    watched: bool = False,
) -> Decoded:
    """Attend to all parts, without waiting for the device.

    Args:
        q: queries in float32, float16 or bfloat16.
        position: of the queries, -1 for padding.
        parts: all tokens.
        value_dim: Dv.
        scale: what to multiply the logits with.
        machine: where this runs.
        watched: keep the logits, as wide as the parts say.
    """
    batch, heads, group, _, _ = q.shape
    streams, device = batch * heads, q.device
    position = position.reshape(-1).contiguous()
    programs = machine.programs
    slots = programs + streams
    ends = torch.empty(max(len(parts), 1), streams, dtype=torch.int32, device=device)
    found = torch.empty(len(parts), slots, group, value_dim, dtype=torch.float32, device=device)
    lse = torch.empty(len(parts), slots, group, dtype=torch.float32, device=device)
    rows, wide = padded(group), min(1024, triton.next_power_of_2(streams))
    logits: list[Tensor] = []
    for i, part in enumerate(parts):
        form = tiling(machine, "decode", part, q.dtype)
        plan_kernel[(1,)](part.length, ends[i], streams, BLOCK=form.block, WIDE=wide, num_warps=4)
        kept = lse
        if watched:
            kept = q.new_full((streams, group, part.width), -torch.inf, dtype=torch.float32)
            logits.append(kept)
        decode_kernel[(programs,)](
            q,
            rows_of(q),
            position,
            found[i],
            lse[i],
            kept,
            part.width,
            ends[i],
            part.length,
            part.tokens,
            streams,
            heads,
            scale * LOG2E,
            GROUP=group,
            ROWS=rows,
            BLOCK=form.block,
            WIDE=wide,
            WATCH=watched,
            VALUE=part.value,
            STAGES=form.stages,
            num_warps=form.warps,
            **part.constants(q.dtype, interpreted=machine.interpreted, asm=machine.asm),
        )
    out = torch.empty(batch, heads, group, 1, value_dim, dtype=q.dtype, device=device)
    total = torch.empty(batch, heads, group, dtype=torch.float32, device=device)
    combine_kernel[(streams,)](
        out,
        total,
        found,
        lse,
        ends,
        position,
        len(parts),
        streams,
        heads,
        programs,
        GROUP=group,
        ROWS=rows,
        DIM=value_dim,
        PADDED=padded(value_dim),
        num_warps=4,
    )
    return Decoded(out, total, tuple(logits))
