"""A pass of several queries of a sequence, and what a policy observes of it by looking back.

The attention matrix is never held. With the log-sum-exp of the pass, blocks of it are worked out
anew and summed over the queries.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_attention import Attended, DenseTokens
from kv_attention.torch_backend import Forward, forward, look_back, parts_of
from kv_cpu import prompt
from kv_cpu.arguments import parts, refused, to_attended, watches
from kv_cpu.few import multi_query_decode
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
    """Attend, then look back natively where `declined` has no reason against it.

    Many queries attend natively where `prompt.declined` has no reason against it, and few to pages.
    All observations are made together, in float32. Arguments and errors are those of
    `backend.attend`.
    """
    if prompt.declined(q, pages, dense, value_dim, isa) is None:
        found = prompt.attend_to_all(q, position, pages, dense, value_dim, scale, isa)
        read = parts_of(q, pages, dense, page_positions)
        done = Forward(q, position, scale, read, found.out, found.lse)
    else:
        stored = multi_query_decode(q, position, pages, value_dim, scale, isa)
        done = forward(q, position, pages, dense, value_dim, scale, page_positions, stored)
    everything = (observe, *others)
    native = [what for what in everything if declined(q, pages, dense, value_dim, what) is None]
    natively = iter(observe_all(done, pages, dense, page_positions, native, isa))
    first, *more = (
        next(natively) if what in native else look_back(done, what) for what in everything
    )
    return replace(first, others=tuple(more))


def observe_all(
    done: Forward,
    pages: Sequence[PagedTokens],
    dense: Sequence[DenseTokens],
    page_positions: Sequence[Int[Tensor, "B H _"] | None],
    watched: Sequence[Observe],
    isa: str | None = None,
) -> list[Attended]:
    """Look back at a pass for several observations at once, none of which is declined."""
    found: Sequence[Tensor] = ()
    length, value_dim = done.q.shape[3], done.out.shape[-1]
    last = [length if what.last is None else what.last for what in watched if what.last != 0]
    if last:
        found = torch.ops.kv_cpu.look_back(
            done.q,
            done.position.long().contiguous(),
            done.lse.contiguous(),
            *parts(pages, page_positions, dense, watched=True),
            *watches(watched),
            last,
            value_dim,
            done.scale,
            isa or chosen(),
        )
    return to_attended(done.out, found, watched)


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
