"""What a policy observes of a pass of many queries: torch attends, and native code looks back.

The attention matrix is never held. With the log-sum-exp of the pass, blocks of it are worked out
anew and summed over the queries.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_attention import Attended, DenseTokens
from kv_attention.torch_backend import forward, look_back
from kv_cpu.arguments import handed_out, parts, refused, watches
from kv_cpu.library import chosen
from kv_policy import Observe, PagedTokens


def attend(
    q: Float[Tensor, "B H G L D"],
    position: Int[Tensor, "B L"],
    pages: Sequence[PagedTokens],
    dense: Sequence[DenseTokens],
    value_dim: int,
    scale: float,
    observe: Observe,
    page_positions: Sequence[Int[Tensor, "B H _"] | None],
    others: Sequence[Observe],
    isa: str | None = None,
) -> Attended:
    """Attend in torch, then look back natively where `declined` has no reason against it.

    All observations are made together, in float32. Arguments and errors are those of
    `backend.attend`.
    """
    done = forward(q, position, pages, dense, value_dim, scale, page_positions)
    everything = (observe, *others)
    native = [what for what in everything if declined(q, pages, dense, value_dim, what) is None]
    found: Sequence[Tensor] = ()
    if any(what.last != 0 for what in native):
        found = torch.ops.kv_cpu.look_back(
            q,
            position.long().contiguous(),
            done.lse.contiguous(),
            *parts(pages, page_positions, dense, watched=True),
            *watches(native),
            [q.shape[3] if what.last is None else what.last for what in native if what.last != 0],
            value_dim,
            scale,
            isa or chosen(),
        )
    natively = iter(handed_out(done.out, found, native))
    first, *more = (
        next(natively) if what in native else look_back(done, what) for what in everything
    )
    return replace(first, others=tuple(more))


def declined(
    q: Float[Tensor, "B H G L D"],
    pages: Sequence[PagedTokens],
    dense: Sequence[DenseTokens],
    value_dim: int,
    what: Observe,
) -> str | None:
    """Say why it is torch that observes this of a pass; None if native code does."""
    if what.gumbel is not None:
        return "attention under Gumbel noise is observed"
    return refused(q, pages, dense, value_dim)
