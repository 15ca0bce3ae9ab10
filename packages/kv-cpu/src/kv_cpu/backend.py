"""The backend `cpu` of kv-attention: native code where it is faster, torch everywhere else."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_attention import Attended, DenseTokens
from kv_attention.torch_backend import attend as attend_in_torch
from kv_cpu import prompt, scores
from kv_cpu.arguments import parts, refused, to_attended, watches
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
    """Attend to all parts, natively where `declined` has no reason against it.

    Products and sums are in float32, whatever the queries are in; the output is in their dtype.

    Args:
        q: queries.
        position: of the queries, -1 for padding.
        pages: stored tokens.
        dense: plain tokens.
        value_dim: Dv.
        scale: what to multiply the logits with.
        observe: the attention to sum per token.
        page_positions: positions of the stored tokens by slot.
        others: further observations.
        isa: the instruction set to use; None: what `chosen` says.

    Raises:
        RuntimeError: a table names a page that its pool does not have, or a length is impossible.
        OSError: the library cannot be loaded.
        ValueError: the environment names an instruction set that does not run here.
    """
    if q.shape[3] > 1:
        return scores.attend(
            q, position, pages, dense, value_dim, scale, observe, page_positions, others, isa
        )
    if declined(q, pages, dense, value_dim, (observe, *others)) is not None:
        return attend_in_torch(
            q, position, pages, dense, value_dim, scale, observe, page_positions, others
        )
    everything = (observe, *others)
    watched = any(what.last != 0 for what in everything)
    found = torch.ops.kv_cpu.decode(
        q,
        position.long().contiguous(),
        *parts(pages, page_positions, dense, watched=watched),
        *watches(everything),
        value_dim,
        scale,
        isa or chosen(),
    )
    out = found[0][:, :, :, None].to(q.dtype)
    first, *more = to_attended(out, found[2:], everything)
    return replace(first, others=tuple(more)) if more else first


def declined(
    q: Float[Tensor, "B H G L D"],
    pages: Sequence[PagedTokens],
    dense: Sequence[DenseTokens],
    value_dim: int,
    watched: Sequence[Observe],
) -> str | None:
    """Say why a pass goes to torch instead of native code; None if it does not.

    Of a pass of several queries that is its output; of looking back at it, `scores.declined` says
    the same.
    """
    if q.shape[3] != 1:
        return prompt.declined(q, pages, dense, value_dim)
    if any(what.gumbel is not None for what in watched if what.last != 0):
        return "attention under Gumbel noise is observed"
    return refused(q, pages, dense, value_dim)
