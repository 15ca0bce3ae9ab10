"""Attention over a prompt's own tokens by the vectors of each head, where latents are stored.

Latents have more dimensions than the keys and values that heads expand from them, so a prompt is
cheaper to attend to before it is stored than after.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxtyping import Bool, Float
from torch import Tensor

from kv_attention import Attended, DenseTokens, attend
from kv_policy import Observe
from kv_runtime.forward_pass import Pass


@dataclass(frozen=True, slots=True)
class Expanded:
    """The vectors of a pass by query head, with which attention over the pass has its logits."""

    query: Float[Tensor, "B Hq L Dq"]
    key: Float[Tensor, "B Hq L Dq"]
    value: Float[Tensor, "B Hq L Dx"]


def observes_tail(now: Pass, watch: Sequence[Observe]) -> bool:
    """Return whether all observations of a prompt are of its last columns, which hold tokens.

    The host synchronizes with the device.
    """
    last = [what.last for what in watch]
    if not now.is_prefill or now.reach is not None or now.position.shape[1] == 1 or None in last:
        return False
    most = max(each for each in last if each is not None)
    return most == 0 or bool((now.position[:, -most:] >= 0).all())


def attended_by_head(
    now: Pass,
    given: Expanded,
    fresh: tuple[Float[Tensor, "B H G L D"], Float[Tensor, "B H L D"], Float[Tensor, "B H L Dv"]],
    scale: float,
    watch: Sequence[Observe],
    backend: str,
    softcap: float | None,
    sinks: Float[Tensor, "H G"] | None,
    chosen: Bool[Tensor, "B L P"] | None = None,
) -> Attended:
    """Attend over the tokens of a prompt by head, and observe its last queries over latents.

    Args:
        now: the pass; nothing is stored before it.
        given: the vectors of each head.
        fresh: queries for the stored vectors, keys and values.
        scale: the factor of the logits.
        watch: the observations, as in `observes_tail`.
        backend: the attention backend.
        softcap: the bound of the logits.
        sinks: a logit of each query head.
        chosen: the tokens that each query attends to by position, as for `kv_attention.attend`.

    Returns:
        The output of each head, and the observations of the new tokens.
    """
    query, key, value = fresh
    out = attend(
        given.query[:, :, None],
        now.position,
        (),
        (DenseTokens(given.key, given.value, now.position),),
        scale,
        backend=backend,
        softcap=softcap,
        sinks=None if sinks is None else sinks.view(-1, 1),
        chosen=chosen,
    ).out.view(*query.shape[:-1], -1)
    most = max(what.last or 0 for what in watch)
    if not most:
        return Attended(out, others=tuple(Attended(out) for _ in watch[1:]))
    found = attend(
        query[..., -most:, :],
        now.position[:, -most:],
        (),
        (DenseTokens(key, value, now.position),),
        scale,
        watch[0],
        backend=backend,
        others=watch[1:],
        softcap=softcap,
        sinks=sinks,
        chosen=None if chosen is None else chosen[:, -most:],
    )
    return replace(found, out=out)
