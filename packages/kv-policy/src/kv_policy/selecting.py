"""Base class of parts that select tokens."""

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

    A method defines `score` and `plan`, and `step` if its `decode` is "step". Constants are class
    attributes, such as `reads = frozenset({"keys"})`; values that depend on parameters are
    properties. It may have a member of any other protocol of `kv_policy.optional`.
    """

    @property
    def selector(self) -> Selector:
        """This method."""
        return self

    @property
    def capabilities(self) -> Capabilities:
        """A selecting cache is shorter than the sequence and depends on later tokens."""
        return Capabilities(
            shortens=True,
            shares_prefixes=False,
            rolls_back=False,
            splits_heads=self.scope == "layer",
        )

    @property
    def tiers(self) -> int:
        """One tier: kept tokens are all stored alike."""
        return 1

    @property
    def budget(self) -> Budget | None:
        """No budget: the method has its own rule."""
        return None

    @property
    def protected(self) -> int:
        """Tokens per head that are always kept."""
        return 0

    @property
    def observe(self) -> Observe:
        """Nothing, unless a method overrides it."""
        return Observe()

    @property
    def reads(self) -> frozenset[VectorName]:
        """No vectors, unless a method overrides it."""
        return frozenset()

    @property
    def needs_rope(self) -> bool:
        """Whether vectors are rotated to other positions: only if queries are read."""
        return "queries" in self.reads

    @property
    def scores_once(self) -> bool:
        """Scores may change with later tokens and queries."""
        return False

    @property
    def scores_last(self) -> bool:
        """Scores may depend on all queries of a prompt."""
        return False

    @property
    def plans_chunks(self) -> bool:
        """Plans wait for the whole prompt."""
        return False

    @property
    def scope(self) -> Literal["layer", "model"]:
        """Each layer is planned separately."""
        return "layer"

    @property
    def decode(self) -> Literal["grow", "step"]:
        """Generated tokens grow the cache."""
        return "grow"

    @property
    def decodes_on_device(self) -> bool:
        """Generated tokens may be scored and placed on the host."""
        return False

    @property
    def victim_tiers(self) -> int:
        """A step's victim may be in any tier."""
        return self.tiers

    @property
    def replan(self) -> Replan:
        """After prompts only."""
        return Replan()

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return the score of each token; higher is kept."""
        raise TypeError(f"{type(self).__name__} must define score(view)")

    def plan(self, view: PlanView) -> UInt8[Tensor, "N B H L"]:
        """Assign each token to a tier, or DROP it."""
        raise TypeError(f"{type(self).__name__} must define plan(view)")
