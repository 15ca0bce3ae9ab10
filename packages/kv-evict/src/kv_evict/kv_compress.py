"""KV-Compress: evicts whole pages, at a rate that varies per head and layer."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from jaxtyping import Float, UInt8
from msgspec import Meta
from torch import Tensor

from kv_evict.pooling import expect_odd, pool
from kv_evict.schedule import cheapest_pages
from kv_policy import (
    Budget,
    Capabilities,
    Evictor,
    LayerView,
    Observe,
    PlanView,
    Replan,
    RunningSum,
    Selector,
)

Rate = Annotated[int, Meta(ge=1)] | Annotated[float, Meta(ge=1)]


@dataclass(frozen=True)
class KVCompress(Evictor):
    """Evict the cheapest pages of all heads and layers of a sequence, until the budget is met.

    A token's metric is the attention it receives from the last `window` queries of the prompt, to
    the `power`, summed over the query heads of its KV head, as a mean over those queries, and the
    maximum over `pool` neighbouring positions (section 4.3; Eq. 8 with Eq. 10). With `window=full`
    all queries count except those fewer than `skip` positions after the token, as a sum, without
    pooling (Eq. 19). The newest `window` tokens, or `skip` of them, and the first `sinks` are
    always kept.

    `keep` is the kept share of the tokens seen, with at least `floor` tokens per head on average;
    `rate` is its inverse, and a `budget` in tokens is an absolute count. `layers=even` gives every
    layer the same budget.

    With `every`, `uncompressed` or `short` tokens are evicted during generation as well: the
    attention of generated queries is added to the metric (Eq. 20). `most` bounds a plan, see
    Replan.

    A pass with fewer queries than the window has the weight of its share of the window, as in
    SnapKV. The paper pools over 7; on SmolLM2-135M that keeps the first digits of a number and
    drops its end.
    """

    name: ClassVar[str] = "kv-compress"
    source: ClassVar[str] = "KV-Compress, Rehg, 2024, https://arxiv.org/abs/2410.00161"
    amounts: ClassVar[tuple[str, ...]] = ("rate", "budget")

    rate: Annotated[
        Rate | None, Meta(description="tokens seen over tokens kept, instead of a budget")
    ] = None
    floor: Annotated[
        int, Meta(ge=1, description="minimum tokens per head of a rate or a share")
    ] = 128
    window: Annotated[
        Annotated[int, Meta(ge=1)] | Literal["full"],
        Meta(description="last queries of the prompt to observe; full: all"),
    ] = 8
    power: Annotated[Literal[1, 2], Meta(description="exponent of the summed attention")] = 2
    pool: Annotated[int, Meta(ge=1, description="neighbouring positions to max-pool over; odd")] = (
        21
    )
    skip: Annotated[int, Meta(ge=0, description="nearest queries to ignore, with window=full")] = 10
    sinks: Annotated[int, Meta(ge=0, description="first tokens, always kept")] = 0
    recent: Annotated[int, Meta(ge=0, description="newest tokens, always kept")] = 8
    layers: Annotated[
        Literal["free", "even"], Meta(description="free: layer budgets may differ; even: equal")
    ] = "free"
    every: Annotated[int, Meta(ge=0, description="generated tokens between plans; 0: none")] = 0
    uncompressed: Annotated[
        int, Meta(ge=0, description="new tokens of the batch that start a plan; 0: never")
    ] = 0
    short: Annotated[bool, Meta(description="plan when the pool has no free page")] = False
    most: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="maximum tokens per plan, over layers and heads"),
    ] = None

    def __post_init__(self) -> None:
        """Check the parameters, one by one and against each other.

        Raises:
            ValueError: both a rate and a budget, a budget below the protected tokens, an even
                `pool`.
        """
        if self.rate is not None and self.budget != type(self).budget:
            raise ValueError(
                f"{self.name}: rate={self.rate} and budget={self.budget} both set how much is "
                "kept; use one of them"
            )
        super().__post_init__()
        expect_odd(self.name, self.pool)
        if self.rate is not None and self.floor < self._held:
            raise ValueError(
                f"{self.name}: floor={self.floor} tokens is smaller than the {self._held} it "
                "protects (sinks and window); use at least that many"
            )

    @classmethod
    def keeping(cls, share: Budget) -> dict[str, Any]:
        """Return the share as a rate if that is whole, the usual text form, else as a budget."""
        rate = 100 / share.amount
        return {"rate": int(rate)} if rate == int(rate) else {"budget": share}

    @property
    def selector(self) -> Selector:
        """This method, with the rate as a budget."""
        if self.rate is None:
            return self
        return replace(self, rate=None, budget=Budget(100 / self.rate, "percent"))

    @property
    def _held(self) -> int:
        """Tokens of each head that no plan evicts."""
        return self.sinks + max(self.recent, self.skip if self.window == "full" else self.window)

    @property
    def protected(self) -> int:
        """Sinks and newest tokens; for a share of the tokens seen at least the floor."""
        share = self.budget.unit == "percent" or self.rate is not None
        return max(self.floor, self._held) if share else self._held

    @property
    def observe(self) -> Observe:
        """The last queries of a prompt, or all but the nearest; generated ones if replanning."""
        full = self.window == "full"
        return Observe(
            last=None if self.window == "full" else self.window,
            group="sum",
            power=self.power,
            skip=self.skip if full else 0,
            generated=self.replan.generating,
        )

    @property
    def scores_last(self) -> bool:
        """A whole window replaces the stored metric; sums over all queries add to it."""
        return self.window != "full"

    @property
    def scope(self) -> Literal["layer", "model"]:
        """All layers share one budget, unless `layers=even`."""
        return "model" if self.layers == "free" else "layer"

    @property
    def capabilities(self) -> Capabilities:
        """Heads share a budget even where layers do not, so a shard of them decides differently."""
        return replace(super().capabilities, splits_heads=False)

    @property
    def replan(self) -> Replan:
        """Replanning as the parameters set it."""
        return Replan(self.every, self.uncompressed, self.short, self.most)

    @property
    def running(self) -> RunningSum | None:
        """The sum that `score` updates during generation, if generated queries are observed."""
        if not self.replan.generating:
            return None
        return RunningSum(1 if self.window == "full" else self.window)

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return the metric of each token."""
        assert view.mass is not None  # it is observed
        assert view.seen is not None
        if self.window == "full":
            return view.score + view.mass
        if view.generated:
            return view.score + view.mass / self.window
        older = view.position < view.length[:, None, None] - self.window
        seen = view.seen.to(view.mass.dtype)
        mean = view.mass / seen.clamp(min=1)
        pooled = pool(mean, view.position, older & (view.position >= 0), self.pool, "max")
        # Window tokens were seen by some of its queries; they are protected until seen again.
        metric = torch.where(older, pooled, view.mass / self.window)
        share = (seen.amax(-1, keepdim=True) / self.window).clamp(max=1)
        return torch.lerp(view.score, metric, share.masked_fill(view.score == 0, 1))

    def plan(self, view: PlanView) -> UInt8[Tensor, "N B H L"]:
        """Evict the cheapest pages, each with a head's lowest metrics, until the budget is met.

        Every tier has its own pages; a token is evicted from its tier, or the one it would enter.
        """
        return cheapest_pages(view, sinks=self.sinks, recent=self._held - self.sinks)
