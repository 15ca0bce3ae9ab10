"""Attention over pages and plain tokens at once."""

from collections.abc import Sequence
from typing import Final

from jaxtyping import Float, Int
from torch import Tensor

from kv_attention.backends import load_backend
from kv_attention.checks import check_parts, check_positions, check_queries
from kv_attention.inputs import AttentionInputs
from kv_attention.tokens import Attended, DenseTokens
from kv_policy import Observe, PagedTokens

NOTHING: Final = Observe()


def attend(
    q: Float[Tensor, "B H G L D"],
    position: Int[Tensor, "B L"],
    pages: Sequence[PagedTokens],
    dense: Sequence[DenseTokens],
    scale: float,
    observe: Observe = NOTHING,
    page_positions: Sequence[Int[Tensor, "B H _"] | None] | None = None,
    backend: str = "torch",
    others: Sequence[Observe] = (),
) -> Attended:
    """Attend to the union of several tiers in pages and several tensors of plain tokens.

    Every stored token precedes all queries, so all see it; a plain token is seen by the queries
    that do not come before it. A query that is padding, or sees no token, gives zeros.

    >>> import torch
    >>> k, place = torch.eye(2)[None, None], torch.tensor([[0, 1]])
    >>> q = torch.zeros(1, 1, 1, 2, 2)
    >>> attend(q, place, [], [DenseTokens(k, k, place)], scale=1.0).out[0, 0, 0]
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])

    Args:
        q: queries by KV head and place in its group, in any floating-point dtype.
        position: of the queries, -1 for padding; real ones ascend.
        pages: stored tokens, one entry a tier.
        dense: plain tokens, such as the raw window and the fresh chunk.
        scale: what to multiply the logits with.
        observe: the attention to sum per token; `last` counts the real queries of each sequence.
            Whether to ask in decoding, as `generated` says, is up to the caller.
        page_positions: positions of the stored tokens by slot, at least as many as the longest
            row has; needed, and read, only where `observe.skip` is above 1 or `gumbel` is set.
        backend: a name in `all_backends()`.
        others: further observations of the same pass.

    A decode step, one query of each sequence, never waits for the device where `longest` of the
    pages and `full` of the plain tokens are given.

    Returns:
        The output in the dtype of `q`, and per part, pages first, the mass and counts asked for, in
        float32 (float64 for queries in float64) and int32.

    Raises:
        ValueError: shapes that do not fit each other, or a backend that cannot be used.
    """
    check_queries(q, position)
    value_dim = check_parts(q, pages, dense)
    positions = [None] * len(pages) if page_positions is None else list(page_positions)
    for what in (observe, *others):
        check_positions(q, pages, positions, what)
    inputs = AttentionInputs(
        q, position, pages, dense, positions, value_dim, scale, (observe, *others)
    )
    return load_backend(backend)(inputs)
