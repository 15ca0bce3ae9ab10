"""Averages over queries that go on from pass to pass."""

from jaxtyping import Float
from torch import Tensor

from kv_policy import LayerView, RunningMean


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
    fresh = view.fresh[:, :1].sum(-1, keepdim=True)  # every head has as many
    before = view.length[:, None, None] - fresh
    return RunningMean(last).update(score, view.position, before, view.mass, view.seen)
