"""A decode step on queries by KV head, as one on an engine's rows: both are the same memory."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor


def attend_grouped(
    attend_rows: Callable[..., bool],
    layer: int,
    query: Float[Tensor, "B H G Lq D"],
    key: Float[Tensor, "B H L D"],
    value: Float[Tensor, "B Hv L Dv"],
    scale: float,
    softcap: float | None,
    sinks: Float[Tensor, "H G"] | None,
) -> Float[Tensor, "B Hv G Lq Dv"] | None:
    """Do what `PolicyCache.attend` does, by rows, if there is one token of each sequence.

    Args:
        attend_rows: `PolicyCache.attend_rows` of the cache.
        layer: the layer.
        query: queries by KV head.
        key: their keys.
        value: their values.
        scale: as for `PolicyCache.attend`.
        softcap: the same.
        sinks: the same.

    Returns:
        The attention; None: the pass needs more, and nothing has been done.
    """
    if query.shape[3] != 1 or key.shape[2] != 1 or key.shape[1] != value.shape[1]:
        return None
    q, k, v = query[:, :, :, 0].flatten(1, 2), key[:, :, 0], value[:, :, 0]
    out = q.new_empty(*q.shape[:2], v.shape[2])
    if not attend_rows(layer, q, k, v, scale, out, 0, softcap, sinks):
        return None
    found: Tensor = out.unflatten(1, (key.shape[1], -1)).unsqueeze(3)
    return found
