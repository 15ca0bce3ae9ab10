"""What most parts that select tokens answer alike."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float, UInt8
from torch import Tensor

from kv_policy.budget import Budget
from kv_policy.contract import Capabilities, LayerView, PlanView, Selector, VectorName
from kv_policy.lifecycle import Observe, Replan
from kv_policy.part import Part


@dataclass(frozen=True)
class Selecting(Part):
    """Base of selectors: one tier, planned per layer after prompts, nothing observed or read.

    A method must give `score` and `plan`, and `step` if its `decode` says "step". What is constant
    it says as a class attribute, such as `reads = frozenset({"keys"})`; what depends on parameters
    is a property. It may have a member of any other protocol of `kv_policy.optional`.
    """

    @property
    def selector(self) -> Selector:
        """This method."""
        return self

    @property
    def capabilities(self) -> Capabilities:
        """A selecting cache is shorter than the sequence and depends on what came later."""
        return Capabilities(
            shortens=True,
            shares_prefixes=False,
            rolls_back=False,
            splits_heads=self.scope == "layer",
        )

    @property
    def tiers(self) -> int:
        """Kept tokens are all stored alike."""
        return 1

    @property
    def budget(self) -> Budget | None:
        """There is none: a rule of its own says what stays."""
        return None

    @property
    def protected(self) -> int:
        """Tokens per head that always stay."""
        return 0

    @property
    def observe(self) -> Observe:
        """Nothing, unless a method asks."""
        return Observe()

    @property
    def reads(self) -> frozenset[VectorName]:
        """No vectors, unless a method asks."""
        return frozenset()

    @property
    def scope(self) -> Literal["layer", "model"]:
        """Each layer is planned alone."""
        return "layer"

    @property
    def decode(self) -> Literal["grow", "step"]:
        """Generated tokens join the cache."""
        return "grow"

    @property
    def replan(self) -> Replan:
        """Prompts only."""
        return Replan()

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Say what each token is worth; higher stays."""
        raise TypeError(f"{type(self).__name__} must define score(view)")

    def plan(self, view: PlanView) -> UInt8[Tensor, "N B H L"]:
        """Send each token to a tier, or drop it."""
        raise TypeError(f"{type(self).__name__} must define plan(view)")
