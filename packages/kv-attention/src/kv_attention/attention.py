"""Attention over paged and dense tokens together."""

from collections.abc import Sequence
from typing import Final

from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_attention.backends import load_backend
from kv_attention.checks import (
    check_chosen,
    check_parts,
    check_positions,
    check_queries,
    check_softmax,
)
from kv_attention.inputs import AttentionInputs
from kv_attention.tokens import Attended, DenseTokens
from kv_policy import Observe, PagedTokens

NOTHING: Final = Observe()
CHOOSES: Final = ("reference", "torch")  # backends that attend to chosen tokens


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
    softcap: float | None = None,
    sinks: Float[Tensor, "H G"] | None = None,
    chosen: Bool[Tensor, "B L P"] | None = None,
    out: Float[Tensor, "B H G L Dv"] | None = None,
) -> Attended:
    """Compute attention over the union of paged tiers and dense tensors of tokens.

    Every stored token precedes all queries and is visible to all of them; a dense token is visible
    to the queries at its position or later. A query that is padding, or sees no token, returns 0.

    >>> import torch
    >>> k, place = torch.eye(2)[None, None], torch.tensor([[0, 1]])
    >>> q = torch.zeros(1, 1, 1, 2, 2)
    >>> attend(q, place, [], [DenseTokens(k, k, place)], scale=1.0).out[0, 0, 0]
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])

    Args:
        q: queries by KV head and index in the GQA group, in any floating-point dtype.
        position: positions of the queries, -1 for padding; the others ascend.
        pages: stored tokens, one entry per tier.
        dense: dense tokens, such as the raw window and the new chunk.
        scale: the factor of the logits.
        observe: the attention mass to sum per token; `last` counts the real queries of a sequence.
            The caller decides whether to observe decode steps, as `generated` specifies.
        page_positions: positions of the stored tokens by slot, at least as many as the longest
            table row; required, and read, only if `observe.skip` is above 1, or `gumbel` or
            `chosen` is set.
        backend: a name in `all_backends()`.
        others: further observations of the same pass.
        softcap: the bound c of the logits x, which become c * tanh(x / c) before the softmax (Gemma
            Team 2024); positive. None: no bound.
        sinks: a logit of each query head, by KV head and index in the GQA group, which takes part
            in the softmax of every query and has no value (OpenAI 2025, gpt-oss): the weights of a
            query's tokens sum to less than 1. It is neither scaled nor capped, and takes no noise.
        chosen: which tokens a query attends to, by position, of those that it sees (the indexer of
            DeepSeek-AI 2025, DeepSeek-V3.2); the same for all heads. Positions past the last are
            not chosen. If no token that a query has chosen is there for a KV head, it attends to
            all that it sees. Tokens that it does not attend to have a probability of 0 in the
            observed mass, and count as seen. Backends other than `reference` leave such a pass to
            `torch`. None: all.
        out: memory for the output, in the dtype of `q`. A backend that can writes there and returns
            this tensor; others return one of their own.

    A decode step, one query of each sequence, does not synchronize with the device if `longest` of
    the pages and `full` of the dense tokens are given.

    Returns:
        The output in the dtype of `q`, and per part, pages first, the requested mass and counts, in
        float32 (float64 for queries in float64) and int32.

    Raises:
        ValueError: the shapes do not match, the backend is unavailable, `softcap` is not a positive
            number, or `page_positions` are required and missing.
    """
    check_queries(q, position)
    check_softmax(q, softcap, sinks)
    value_dim = check_parts(q, pages, dense)
    positions = [None] * len(pages) if page_positions is None else list(page_positions)
    for what in (observe, *others):
        check_positions(q, pages, positions, what, chooses=chosen is not None)
    check_chosen(q, chosen)
    inputs = AttentionInputs(
        q,
        position,
        pages,
        dense,
        positions,
        value_dim,
        scale,
        (observe, *others),
        softcap,
        sinks,
        chosen,
        out,
    )
    given = load_backend(backend)
    return (given if chosen is None or backend in CHOOSES else load_backend("torch"))(inputs)
