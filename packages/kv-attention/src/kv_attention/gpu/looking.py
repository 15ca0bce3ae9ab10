"""What is observed, launched: of a decode step from its logits, of a prompt by a second pass."""

from collections.abc import Sequence
from typing import Final, TypeAlias

import torch
import triton
from jaxtyping import Float, Int
from torch import Tensor

from kv_attention.gpu.arguments import Part, rows_of
from kv_attention.gpu.look_back import look_back_kernel
from kv_attention.gpu.steps import LOG2E, Decoded
from kv_attention.gpu.tuning import Machine, tiling
from kv_attention.gpu.watch import watch_kernel
from kv_attention.tokens import Attended
from kv_policy import Observe

TERMS: Final = {"squares": 1, "entropy": 2}
MODES: Final = {"sum": 0, "mean": 1, "max": 2, "max-of-sums": 3}
Places: TypeAlias = Int[Tensor, "B _ _"] | None


def watch(
    done: Decoded,
    position: Int[Tensor, "B 1"],
    parts: Sequence[Part],
    places: Sequence[Places],
    what: Observe,
) -> Attended:
    """Sum the attention of a decode step that kept its logits."""
    if what.last == 0:
        return Attended(done.out)
    batch, heads, group = done.lse.shape
    found = []
    for part, logits, place in zip(parts, done.logits, places, strict=True):
        mass, seen, terms = _sums(part, batch, heads, what, done.lse.device)
        if part.width:
            block = min(1024, triton.next_power_of_2(part.width))
            watch_kernel[(triton.cdiv(part.width, block), batch * heads)](
                logits,
                done.lse,
                position.reshape(-1).contiguous(),
                *_placed(part, place),
                mass,
                seen,
                part.width,
                batch * heads,
                heads,
                what.above or 0.0,
                what.skip,
                GROUP=group,
                BLOCK=block,
                MAX=what.group in ("max", "max-of-sums"),
                MEAN=what.group == "mean",
                TERMS=terms,
                FAR=what.skip > int(part.paged),
                num_warps=4,
            )
        found.append((mass, seen))
    return _attended(done.out, found, what)


def look_back(
    rows: Float[Tensor, "B H G w D"],
    position: Int[Tensor, "B w"],
    lse: Float[Tensor, "B H G w"],
    out: Float[Tensor, "B H G L Dv"],
    parts: Sequence[Part],
    places: Sequence[Places],
    scale: float,
    machine: Machine,
    what: Observe,
) -> Attended:
    """Sum the attention of the queries that count, tile by tile, anew.

    Args:
        rows: those queries.
        position: theirs, ascending, -1 for one that does not count.
        lse: theirs over all parts.
        out: of the pass.
        parts: all tokens, with their widths.
        places: positions of the tokens of each part.
        scale: what to multiply the logits with.
        machine: where this runs.
        what: to be summed; its `last` is already done.
    """
    batch, heads, group, queries, _ = rows.shape
    found = []
    for part, place in zip(parts, places, strict=True):
        mass, seen, terms = _sums(part, batch, heads, what, rows.device)
        if part.width:
            form = tiling(machine, "look_back", part, rows.dtype)
            look_back_kernel[(triton.cdiv(part.width, form.block), batch * heads)](
                rows,
                rows_of(rows),
                rows.stride(3),
                position.contiguous(),
                lse.contiguous(),
                part.length,
                part.tokens,
                *_placed(part, place),
                mass,
                seen,
                part.width,
                queries,
                batch * heads,
                heads,
                scale * LOG2E,
                what.above or 0.0,
                what.skip,
                GROUP=group,
                MODE=MODES[what.group],
                TERMS=terms,
                FAR=what.skip > int(part.paged),
                ROWS=max(16, min(form.queries, triton.next_power_of_2(queries))),
                BLOCK=form.block,
                num_warps=form.warps,
                **part.constants(rows.dtype, interpreted=machine.interpreted, asm=machine.asm),
            )
        found.append((mass, seen))
    return _attended(out, found, what)


def _sums(
    part: Part, batch: int, heads: int, what: Observe, device: torch.device
) -> tuple[Float[Tensor, "terms B H W"], Int[Tensor, "B H W"], tuple[int, ...]]:
    """Memory for what is observed of a part, and the kernels' numbers of the terms."""
    first = 3 if what.above is not None else int(what.power == 2)
    terms = (first, *(TERMS[name] for name in sorted(what.also)))
    mass = torch.empty(len(terms), batch, heads, part.width, dtype=torch.float32, device=device)
    seen = torch.empty(batch, heads, part.width, dtype=torch.int32, device=device)
    return mass, seen, terms


def _placed(part: Part, place: Places) -> tuple[Tensor, tuple[int, ...]]:
    """Positions of a part's tokens with their strides; anything where nobody asks for them."""
    if place is None:
        return part.length, (0, 0, 0)
    return place, (place.stride(0), place.stride(1) if place.shape[1] > 1 else 0, place.stride(2))


def _attended(out: Tensor, found: Sequence[tuple[Tensor, Tensor]], what: Observe) -> Attended:
    names = sorted(what.also)
    return Attended(
        out,
        tuple(mass[0] for mass, _ in found),
        tuple(seen for _, seen in found),
        tuple({name: mass[1 + i] for i, name in enumerate(names)} for mass, _ in found),
    )
