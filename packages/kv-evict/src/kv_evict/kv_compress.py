"""KV-Compress: whole pages go, at a rate that differs per head and layer."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from jaxtyping import Float, UInt8
from msgspec import Meta
from torch import Tensor

from kv_evict.pooling import pool
from kv_evict.schedule import offers, taken, without
from kv_policy import (
    DROP,
    FRESH,
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
    """Let the cheapest pages of all heads and layers of a sequence go, until the budget is met.

    A token's metric is the attention that the last `window` queries of the prompt pay it, to the
    `power`, summed over the query heads of its KV head, as a mean over those queries, and the
    largest of `pool` neighbouring positions (section 4.3; Eq. 8 with Eq. 10). With `window=full`
    all queries count but those fewer than `skip` positions after the token, as a sum, and nothing
    is pooled (Eq. 19). The newest `window` tokens, or `skip` of them, and the first `sinks` stay.

    `keep` says which share of the tokens seen is kept, never fewer than `floor` a head on average;
    `rate` is its inverse, and a `budget` in tokens says how many. `layers=even` gives every layer
    the same.

    With `every`, `uncompressed` or `short` tokens are let go of while generating as well: what
    generated queries pay is added to the metric (Eq. 20). `most` bounds a plan, as Replan says.

    A pass with fewer queries than the window counts for its share of the window, as in SnapKV. The
    paper pools over 7; on SmolLM2-135M that keeps the first digits of a number and drops its end.
    """

    name: ClassVar[str] = "kv-compress"
    source: ClassVar[str] = "KV-Compress, Rehg, 2024, https://arxiv.org/abs/2410.00161"
    amounts: ClassVar[tuple[str, ...]] = ("rate", "budget")

    rate: Annotated[
        Rate | None, Meta(description="tokens seen over tokens kept, instead of a budget")
    ] = None
    floor: Annotated[
        int, Meta(ge=1, description="tokens per head that a rate never goes below")
    ] = 128
    window: Annotated[
        Annotated[int, Meta(ge=1)] | Literal["full"],
        Meta(description="last queries of the prompt that count; full: all"),
    ] = 8
    power: Annotated[Literal[1, 2], Meta(description="of the attention that is summed")] = 2
    pool: Annotated[
        int, Meta(ge=1, description="neighbouring positions whose largest metric counts; odd")
    ] = 21
    skip: Annotated[
        int, Meta(ge=0, description="nearest queries that do not count, in window=full")
    ] = 10
    sinks: Annotated[int, Meta(ge=0, description="first tokens, always kept")] = 0
    recent: Annotated[int, Meta(ge=0, description="newest tokens, always kept")] = 8
    layers: Annotated[
        Literal["free", "even"], Meta(description="whether layers may keep different amounts")
    ] = "free"
    every: Annotated[int, Meta(ge=0, description="generated tokens between plans; 0: none")] = 0
    uncompressed: Annotated[
        int, Meta(ge=0, description="tokens of the batch since a plan that ask for one; 0: none")
    ] = 0
    short: Annotated[bool, Meta(description="plan when the pool has no page for a step")] = False
    most: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="tokens over layers and heads that one plan takes"),
    ] = None

    def __post_init__(self) -> None:
        """Check the parameters, one by one and against each other.

        Raises:
            ValueError: a rate and a budget, a budget below what is protected, an even `pool`.
        """
        if self.rate is not None and self.budget != type(self).budget:
            raise ValueError(
                f"{self.name}: rate={self.rate} and budget={self.budget} both say how much is "
                "kept; give one of them"
            )
        super().__post_init__()
        if self.pool % 2 == 0:
            raise ValueError(
                f"{self.name}: pool={self.pool} has no middle; give an odd number, such as "
                f"{self.pool + 1}"
            )
        if self.rate is not None and self.floor < self._held:
            raise ValueError(
                f"{self.name}: floor={self.floor} tokens is smaller than the {self._held} it "
                "protects (sinks and window); give at least that many"
            )

    @classmethod
    def keeping(cls, share: Budget) -> dict[str, Any]:
        """Keep a share: as a rate where that is whole, as texts have always said it."""
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
        """Tokens of each head that no plan lets go of."""
        return self.sinks + max(self.recent, self.skip if self.window == "full" else self.window)

    @property
    def protected(self) -> int:
        """Sinks and newest tokens; of a share of the tokens seen, at least the floor."""
        share = self.budget.unit == "percent" or self.rate is not None
        return max(self.floor, self._held) if share else self._held

    @property
    def observe(self) -> Observe:
        """The last queries of a prompt or all but the nearest, and what is generated if asked."""
        full = self.window == "full"
        return Observe(
            last=None if self.window == "full" else self.window,
            group="sum",
            power=self.power,
            skip=self.skip if full else 0,
            generated=self.replan.generating,
        )

    @property
    def scope(self) -> Literal["layer", "model"]:
        """All layers share one budget, unless they are to have the same."""
        return "model" if self.layers == "free" else "layer"

    @property
    def capabilities(self) -> Capabilities:
        """Heads share a budget even where layers do not, so a shard of them decides otherwise."""
        return replace(super().capabilities, splits_heads=False)

    @property
    def replan(self) -> Replan:
        """As the parameters say."""
        return Replan(self.every, self.uncompressed, self.short, self.most)

    @property
    def running(self) -> RunningSum | None:
        """What `score` adds up while tokens are generated, where that is observed."""
        if not self.replan.generating:
            return None
        return RunningSum(1 if self.window == "full" else self.window)

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Give a token its metric."""
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
        # Tokens of the window were seen by a part of it; they are safe until they are seen again.
        metric = torch.where(older, pooled, view.mass / self.window)
        share = (seen.amax(-1, keepdim=True) / self.window).clamp(max=1)
        return torch.lerp(view.score, metric, share.masked_fill(view.score == 0, 1))

    def plan(self, view: PlanView) -> UInt8[Tensor, "N B H L"]:
        """Let the cheapest pages go, each a head's lowest metrics, until the budget is met.

        Every tier has pages of its own; a token leaves the tier that it is in, or would enter.
        """
        here = view.position >= 0
        newest = view.length[None, :, None, None] - (self._held - self.sinks)
        safe = (view.position < self.sinks) | (view.position >= newest)
        score = view.score.masked_fill(safe, torch.inf)
        tier = view.tier.masked_fill(view.tier == FRESH, 0)
        page = torch.ones(1, dtype=torch.long) if view.page is None else view.page
        inside = [here & (tier == i) for i in range(len(page))]
        each = [offers(score, held, size) for held, size in zip(inside, page, strict=True)]
        heads = here.shape[0] * here.shape[2]
        excess = here.sum((0, 2, 3)) - view.budget * heads
        stays = torch.zeros_like(here)
        for held, count in zip(inside, taken(each, excess), strict=True):
            stays |= without(score, held, count)
        return torch.where(stays, tier, DROP)
