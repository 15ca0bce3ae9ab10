"""Averages over queries that go on from pass to pass."""

from jaxtyping import Float
from torch import Tensor

from kv_policy import LayerView


def running_mean(
    view: LayerView, score: Float[Tensor, "B H L"], last: int | None
) -> Float[Tensor, "B H L"]:
    """Average what a token got from the queries after it, those of this pass included.

    With `last` a token's past counts as at most that many queries, so what generated queries say
    replaces it gradually; `score` is that past's average. The token's own query is not among them:
    the policy must observe with a `skip` of 1.
    """
    assert view.mass is not None  # it is observed
    assert view.seen is not None
    before = view.length[:, None, None] - view.fresh.sum(-1, keepdim=True)
    past = (before - 1 - view.position).clamp(min=0, max=last)
    seen = past + view.seen
    mean = (score * past + view.mass) / seen.clamp(min=1)
    return mean.masked_fill(view.position < 0, 0)
