"""Attention over a part of the tokens, and the largest probability that a token receives."""

from collections.abc import Sequence
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_attention.backends import load_partial
from kv_attention.checks import check_parts, check_queries, check_softmax
from kv_attention.inputs import AttentionInputs
from kv_attention.partial import Partial, Scored
from kv_attention.tokens import DenseTokens
from kv_attention.torch_backend import partial_of, parts_of
from kv_policy import PagedTokens

_ROOM: Final = 1 << 22  # logits in memory at the same time
_NEVER: Final = 1e30  # the log-sum-exp of a query without tokens: its probabilities are 0


def attend_partly(
    q: Float[Tensor, "B H G L D"],
    position: Int[Tensor, "B L"],
    pages: Sequence[PagedTokens],
    dense: Sequence[DenseTokens],
    scale: float,
    backend: str = "torch",
    softcap: float | None = None,
    sinks: Float[Tensor, "H G"] | None = None,
) -> Partial:
    """Compute attention over some of the tokens that queries see, to be merged with the rest.

    The arguments, and which tokens a query sees, are as for `attend`. What the backend has no code
    for is computed in plain torch. Of several sets of tokens whose results are merged, one has the
    sinks, which would count once for each otherwise.

    >>> k, place = torch.eye(2)[None, None], torch.tensor([[0, 1]])
    >>> q = torch.zeros(1, 1, 1, 2, 2)
    >>> one, other = (DenseTokens(k[:, :, i:i+1], k[:, :, i:i+1], place[:, i:i+1]) for i in (0, 1))
    >>> (attend_partly(q, place, [], [one], 1.0) + attend_partly(q, place, [], [other], 1.0)).out
    tensor([[[[[1.0000, 0.0000],
               [0.5000, 0.5000]]]]])

    Returns:
        The output, and the log-sum-exp in float32, or in float64 for queries in float64; 0 and
        -inf for a query that is padding or sees no token.

    Raises:
        ValueError: as `attend`.
    """
    check_queries(q, position)
    check_softmax(q, softcap, sinks)
    value_dim = check_parts(q, pages, dense)
    inputs = AttentionInputs(
        q,
        position,
        pages,
        dense,
        [None] * len(pages),
        value_dim,
        scale,
        softcap=softcap,
        sinks=sinks,
    )
    return _scored(inputs, 0, backend).partial


def attend_and_score(
    q: Float[Tensor, "B H G L D"],
    position: Int[Tensor, "B L"],
    dense: Sequence[DenseTokens],
    scored: int,
    scale: float,
    backend: str = "torch",
    softcap: float | None = None,
    sinks: Float[Tensor, "H G"] | None = None,
) -> Scored:
    """Compute attention over some of the tokens, and the largest probabilities of the first ones.

    >>> k, place = torch.eye(2)[None, None], torch.tensor([[0, 1]])
    >>> q = torch.zeros(1, 1, 1, 1, 2)
    >>> attend_and_score(q, place[:, 1:], [DenseTokens(k, k, place)], 1, 1.0).largest
    (tensor([[[0.5000, 0.5000]]]),)

    Args:
        q: queries, as for `attend`.
        position: positions of the queries, -1 for padding.
        dense: the tokens.
        scored: how many parts of these, the first ones, are scored; all queries see their tokens.
        scale: the factor of the logits.
        backend: a name in `all_backends()`; torch does what it has no code for.
        softcap: the bound of the logits, as for `attend`.
        sinks: a logit of each query head, as for `attend`; probabilities are normalized with it.

    Raises:
        ValueError: as `attend`, or a scored token comes after a query.
    """
    check_queries(q, position)
    check_softmax(q, softcap, sinks)
    value_dim = check_parts(q, [], dense)
    last = torch.iinfo(position.dtype).max
    first = position.masked_fill(position < 0, last).amin(1)
    for i, tokens in enumerate(dense[:scored]):
        if bool((tokens.position.amax(1) > first).any()):
            raise ValueError(
                f"dense[{i}] is scored and has a token after a query; all queries must see it"
            )
    inputs = AttentionInputs(
        q, position, [], dense, [], value_dim, scale, softcap=softcap, sinks=sinks
    )
    return _scored(inputs, scored, backend)


def _scored(inputs: AttentionInputs, scored: int, backend: str) -> Scored:
    own = load_partial(backend)
    found = None if own is None else own(inputs, scored)
    if found is not None:
        return found
    total = partial_of(inputs, parts_of(inputs))
    most = []
    for tokens in inputs.dense[:scored]:
        probability = largest_probabilities(
            inputs.q, total.lse, tokens.key, inputs.scale, inputs.softcap
        )
        most.append(probability.masked_fill(tokens.position[:, None] < 0, 0))
    return Scored(total, tuple(most))


def largest_probabilities(
    q: Float[Tensor, "B H G L D"],
    lse: Float[Tensor, "B H G L"],
    key: Float[Tensor, "B H S D"],
    scale: float,
    softcap: float | None = None,
) -> Float[Tensor, "B H S"]:
    """Return the largest probability that any query of any query head gives each token.

    All queries count for all tokens. Memory is bounded: logits of a few tokens exist at a time.

    >>> q, key = torch.zeros(1, 1, 1, 3, 2), torch.eye(2)[None, None]
    >>> largest_probabilities(q, torch.full((1, 1, 1, 3), 2.0).log(), key, scale=1.0)
    tensor([[[0.5000, 0.5000]]])

    Args:
        q: the queries.
        lse: the log-sum-exp of each query's logits, over which its probabilities are normalized;
            -inf: the query does not count, whatever its numbers.
        key: the keys of the tokens.
        scale: the factor of the logits.
        softcap: the bound of the logits, as for `attend`.
    """
    rows = q.shape[0] * q.shape[1]
    ignored = lse == -torch.inf
    away = lse.masked_fill(ignored, _NEVER).neg()
    scaled = (q.to(lse.dtype) * scale).masked_fill(ignored[..., None], 0)  # may be NaN in padding
    keys = key.to(lse.dtype).flatten(0, 1)
    if softcap is None:
        # A key with 1 appended, times a query with -lse, is the logarithm of a probability.
        scaled = torch.cat((scaled, away[..., None]), -1)
        keys = torch.nn.functional.pad(keys, (0, 1), value=1)
    scaled = scaled.view(rows, -1, scaled.shape[-1])
    count, tokens = scaled.shape[1], keys.shape[1]
    step = min(tokens, max(1, _ROOM // (rows * count)))
    room = scaled.new_empty(rows * step * count)  # one for all blocks
    most = []
    for start in range(0, tokens, step):
        block = keys[:, start : start + step]
        log = room[: rows * block.shape[1] * count].view(rows, -1, count)
        torch.bmm(block, scaled.mT, out=log)
        if softcap is not None:
            log.div_(softcap).tanh_().mul_(softcap).add_(away.view(rows, 1, count))
        most.append(log.amax(-1))
    return torch.cat(most, 1).exp_().view(*key.shape[:-1])
