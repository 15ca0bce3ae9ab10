"""SnapKV: tokens that the last queries of the prompt attend to, and their neighbours."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float
from msgspec import Meta
from torch import Tensor

from kv_evict.pooling import expect_odd, pool
from kv_policy import Evictor, LayerView, Observe


@dataclass(frozen=True)
class SnapKV(Evictor):
    """Keep the last `window` tokens and those their queries attend to most, `budget` in all.

    A token's score is the attention probability it receives from a query of the window, averaged
    over the window's queries and over the query heads of its KV head (`group`), pooled over `pool`
    neighbouring positions. The window itself is always kept and is left out of the pooling.
    Generated tokens grow the cache; the next prompt is compressed together with stored tokens.

    A pass with fewer queries than the window, such as a short question after a long text, has only
    a part of the window. Its weight in the score is that share of the window; the rest is the
    token's stored score. A token without one (it is new, or was inside the window until now) is
    scored by this pass alone.

    The paper's code pools over 5 or 7 neighbours. On SmolLM2-135M a mean over 21 finds far more
    hidden numbers than one over 5, which keeps the first digits of a number and drops its end,
    so 21 is the default. Evicted neighbours are left out of a pool.
    """

    name: ClassVar[str] = "snapkv"
    source: ClassVar[str] = "SnapKV, Li et al., 2024, https://arxiv.org/abs/2404.14469"

    scores_last = True  # a whole window replaces the stored scores

    window: Annotated[
        int, Meta(ge=1, description="last tokens of the prompt: always kept, their queries score")
    ] = 32
    pool: Annotated[
        int, Meta(ge=1, description="neighbouring positions to pool scores over; odd")
    ] = 21
    pooling: Annotated[
        Literal["avg", "max"], Meta(description="pooling of neighbouring scores")
    ] = "avg"
    group: Annotated[
        Literal["mean", "sum", "max"],
        Meta(description="reduction over the query heads of a KV head"),
    ] = "mean"

    def __post_init__(self) -> None:
        """Check the parameters."""
        super().__post_init__()
        expect_odd(self.name, self.pool)

    @property
    def recent(self) -> int:
        """The window."""
        return self.window

    @property
    def observe(self) -> Observe:
        """The last queries of a prompt."""
        return Observe(last=self.window, group=self.group)

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return the pooled attention of the window, and infinity inside the window."""
        score = view.score.masked_fill(~view.score.isfinite(), 0)
        if view.mass is not None and view.seen is not None:
            older = view.position < view.length[:, None, None] - self.window
            counts = older & (view.position >= 0)
            seen = view.seen.to(score.dtype)
            mean = view.mass.to(score.dtype) / seen.clamp(min=1)
            pooled = pool(mean, view.position, counts, self.pool, self.pooling)
            share = (seen / self.window).masked_fill(score == 0, 1)
            score = torch.lerp(score, pooled, share)
        return self.protect(score, view)
