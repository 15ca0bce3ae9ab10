"""Running averages over queries."""

from jaxtyping import Float
from torch import Tensor

from kv_policy import LayerView, RunningMean


def running_mean(
    view: LayerView, score: Float[Tensor, "B H L"], last: int | None
) -> Float[Tensor, "B H L"]:
    """Return the mean attention a token received from the queries after it, this pass included.

    With `last` past queries have at most that weight, so generated queries gradually replace them;
    `score` is the past average. A token's own query does not count: the policy must observe with a
    `skip` of 1.
    """
    assert view.mass is not None  # it is observed
    assert view.seen is not None
    fresh = view.fresh[:, :1].sum(-1, keepdim=True)  # the same for every head
    before = view.length[:, None, None] - fresh
    return RunningMean(last).update(score, view.position, before, view.mass, view.seen)
