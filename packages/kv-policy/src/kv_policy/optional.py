"""What a selector may say besides `score` and `plan`, and what holds where it does not.

Each protocol is one question of a host, and a selector may have the members of any of them. A host
never asks a selector itself: it asks `complete(selector)`, which has an answer to every question.
"""

from typing import Literal, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from kv_policy.budget import Budget
from kv_policy.contract import LayerView, PlanView, Step, StepView, VectorName
from kv_policy.lifecycle import Observe, Replan, Running


@runtime_checkable
class Tiered(Protocol):
    """Sends tokens to more than one tier."""

    @property
    def tiers(self) -> int:
        """K, tiers it sends tokens to, best first; a token only ever moves to a later one."""
        ...


@runtime_checkable
class Budgeted(Protocol):
    """Keeps within a budget."""

    @property
    def budget(self) -> Budget | None:
        """What may be kept, unless a request brings a budget of its own.

        None: it goes by a rule of its own, and a request may bring no budget.
        """
        ...


@runtime_checkable
class Protecting(Protocol):
    """Always keeps some tokens."""

    @property
    def protected(self) -> int:
        """Tokens per head it always keeps (sinks, window): the smallest budget it can meet."""
        ...


@runtime_checkable
class Observing(Protocol):
    """Scores tokens by the attention they get."""

    @property
    def observe(self) -> Observe:
        """What to watch while attending: it fills `mass`, `seen` and `also` of a view."""
        ...


@runtime_checkable
class Reading(Protocol):
    """Scores tokens by vectors."""

    @property
    def reads(self) -> frozenset[VectorName]:
        """Vectors that `score` looks at; queries can be asked for if the host knows the RoPE."""
        ...


@runtime_checkable
class Scoped(Protocol):
    """Plans several layers together."""

    @property
    def scope(self) -> Literal["layer", "model"]:
        """Whether `plan` sees one layer at a time or must see the scores of all."""
        ...


@runtime_checkable
class Summarizing(Protocol):
    """Lets a plan know more of a head than its scores."""

    def head_stats(self, view: LayerView) -> Float[Tensor, "B H"] | None:
        """Say of each head what `plan` is to know beside the scores, such as what it asks for.

        Asked with `score`, of the same view, after prompts.
        """
        ...


@runtime_checkable
class Replanning(Protocol):
    """Plans again while tokens are generated."""

    @property
    def replan(self) -> Replan:
        """When `plan` runs again while tokens are generated."""
        ...


@runtime_checkable
class Accumulating(Protocol):
    """Scores tokens by a mean or sum over the queries after them."""

    @property
    def running(self) -> Running | None:
        """The mean or sum that `score` gives while tokens are generated; None: something else.

        Hosts may keep it up where scores lie, and ask `score` about other tokens alone.
        """
        ...


@runtime_checkable
class Stepping(Protocol):
    """Decides about each generated token."""

    def step(self, view: StepView) -> Step:
        """Place the candidate of each head, and move at most one victim."""
        ...


@runtime_checkable
class Decoding(Protocol):
    """Says whether its steps are asked; one that does not say it steps if it has a `step`."""

    @property
    def decode(self) -> Literal["grow", "step"]:
        """Whether generated tokens just join the cache or each is a `step`."""
        ...


@runtime_checkable
class Windowing(Protocol):
    """Keeps the newest tokens from being victims of a step."""

    def recent_tokens(self, budget: Int[Tensor, " B"]) -> Int[Tensor, " B"] | None:
        """How many of the newest tokens no step takes as its victim; None: the weakest of all."""
        ...


@runtime_checkable
class Thresholding(Protocol):
    """Lets steps know more of a prompt's plan than what it kept."""

    def tier_thresholds(self, view: PlanView) -> Float[Tensor, "K N B H"] | None:
        """Say per head what `step` is to know of a prompt's plan, such as the scores tiers ask for.

        Asked after `plan`, of the same view, where tokens are placed by steps; hosts carry the
        answer. None: nothing.
        """
        ...
