"""The backend `triton` of kv-attention: compiled for GPUs, torch for what it does not take."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from jaxtyping import Float, Int
from torch import Tensor

from kv_attention.compiled import refused
from kv_attention.observe import last_queries
from kv_attention.tokens import Attended, DenseTokens
from kv_attention.torch_backend import Forward, parts_of
from kv_attention.torch_backend import attend as attend_in_torch
from kv_attention.torch_backend import look_back as look_back_in_torch
from kv_policy import Observe, PagedTokens
from kv_policy.interpreter import interpreted

MOST_DIM: Final = 256  # of a vector: wider tiles do not fit beside each other


def declined(
    q: Float[Tensor, "B H G L D"],
    pages: Sequence[PagedTokens],
    dense: Sequence[DenseTokens],
    value_dim: int,
) -> str | None:
    """Say why a pass goes to torch; None if it does not."""
    if q.device.type != "cuda" and not interpreted():
        return f"tensors on {q.device.type}"
    return refused(q, pages, dense, value_dim, MOST_DIM)


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
) -> Attended:
    """Attend to all parts by kernels where `declined` has no reason against it.

    Logits and sums are in float32; products are in float16 or bfloat16 where queries and tokens
    are, and codes always fit. A decode step does not wait for the device, except for how long the
    streams are where somebody observes them and nobody said it.
    """
    if declined(q, pages, dense, value_dim) is not None:
        return attend_in_torch(
            q, position, pages, dense, value_dim, scale, observe, page_positions, others
        )
    # Late, as only here anything needs triton.
    from kv_attention.gpu.arguments import dense_part, paged_part
    from kv_attention.gpu.attention_mass import look_back, watch
    from kv_attention.gpu.decode import decode
    from kv_attention.gpu.prefill import attend_to_all
    from kv_attention.gpu.tuning import machine_of

    everything = (observe, *others)
    watched = any(what.last != 0 for what in everything)
    machine = machine_of(q.device)
    parts = [
        *(paged_part(part, watched=watched) for part in pages),
        *(dense_part(tokens, q.shape[1]) for tokens in dense),
    ]
    places = [*page_positions, *(tokens.position[:, None] for tokens in dense)]
    if q.shape[3] == 1:
        step = decode(q, position, parts, value_dim, scale, machine, watched=watched)
        out, lse = step.out, step.lse[..., None]
    else:
        found = attend_to_all(q, position, parts, value_dim, scale, machine)
        out, lse = found.out, found.lse

    def seen(what: Observe) -> Attended:
        if what.last == 0:
            return Attended(out)
        if what.gumbel is not None:  # noise of torch's own making
            read = parts_of(q, pages, dense, page_positions)
            return look_back_in_torch(Forward(q, position, scale, read, out, lse), what)
        if q.shape[3] == 1:
            return watch(step, position, parts, places, what)
        rows, at, some = last_queries(q, position, lse, what.last)
        return look_back(rows, at, some, out, parts, places, scale, machine, what)

    first, *more = (seen(what) for what in everything)
    return replace(first, others=tuple(more))
