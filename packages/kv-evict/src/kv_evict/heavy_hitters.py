"""Bases of methods that keep the tokens with the most accumulated attention, as H2O."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxtyping import Float
from msgspec import Meta
from torch import Tensor

from kv_policy import Evictor, LayerView, Observe, Replan, RunningSum


@dataclass(frozen=True)
class HeavyHitters(Evictor):
    """Score a token by the attention that it receives from all observed queries.

    Of the budget, `recent` is for the newest tokens.
    """

    recent: Annotated[
        float, Meta(ge=0, le=1, description="share of the budget for the newest tokens")
    ] = 0.5
    group: Annotated[
        Literal["mean", "sum", "max"],
        Meta(description="reduction over the query heads of a KV head"),
    ] = "mean"

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Accumulate the attention that a token receives."""
        assert view.mass is not None  # it is observed
        return view.score + view.mass


@dataclass(frozen=True)
class ReplannedHeavyHitters(HeavyHitters):
    """Keep H2O's tokens; `every` generated tokens, sequences are planned to the budget again.

    Methods that merge do so when a plan drops tokens, so no decode step drops any.
    """

    every: Annotated[int, Meta(ge=0, description="generated tokens between plans; 0: none")] = 128

    @property
    def observe(self) -> Observe:
        """Every query of a prompt, and generated ones if they are planned by."""
        return Observe(last=None, group=self.group, generated=self.replan.generating)

    @property
    def replan(self) -> Replan:
        """After `every` generated tokens."""
        return Replan(self.every)

    @property
    def running(self) -> RunningSum | None:
        """The sum that `score` updates, if generated queries are observed."""
        return RunningSum() if self.replan.generating else None

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Accumulate the attention that a token receives, if queries are observed."""
        return view.score if view.mass is None else super().score(view)
