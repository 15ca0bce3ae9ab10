"""Optional members of a selector besides `score` and `plan`.

Each protocol has one optional member, and a selector may have any of them. Hosts never read a
selector directly: they use `complete(selector)`, which has a value or default for each member.
"""

from typing import Literal, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from kv_policy.budget import Budget
from kv_policy.contract import LayerView, Merge, MergeView, PlanView, Step, StepView, VectorName
from kv_policy.lifecycle import Observe, Replan, Replay, Running


@runtime_checkable
class Tiered(Protocol):
    """Assigns tokens to more than one tier."""

    @property
    def tiers(self) -> int:
        """K, the number of tiers, best first; a token only moves to a later one."""
        ...


@runtime_checkable
class Budgeted(Protocol):
    """Keeps within a budget."""

    @property
    def budget(self) -> Budget | None:
        """The default budget; a request may override it.

        None: the selector has its own rule, and a request cannot set a budget.
        """
        ...


@runtime_checkable
class Protecting(Protocol):
    """Protects some tokens from eviction."""

    @property
    def protected(self) -> int:
        """Tokens per head that are always kept (sinks, window): the smallest possible budget."""
        ...


@runtime_checkable
class Observing(Protocol):
    """Scores tokens by the attention they receive."""

    @property
    def observe(self) -> Observe:
        """What to sum during attention: it fills `mass`, `seen` and `also` of a view."""
        ...


@runtime_checkable
class Replaying(Protocol):
    """Scores tokens by the attention of a second reading of the prompt."""

    @property
    def replay(self) -> Replay | None:
        """What the model reads again: it fills `replayed` of a prompt's view; None: nothing.

        Hosts that cannot run the model themselves refuse such a policy.
        """
        ...


@runtime_checkable
class Reading(Protocol):
    """Scores tokens by vectors."""

    @property
    def reads(self) -> frozenset[VectorName]:
        """Vectors that `score` and `rescore` read; queries are for `score` alone.

        Reading queries requires that the host knows the RoPE.
        """
        ...


@runtime_checkable
class Rotating(Protocol):
    """Rotates vectors to other positions."""

    @property
    def needs_rope(self) -> bool:
        """Whether `score` reads `view.shape.rope`; hosts that do not know it refuse the policy.

        By default it does if the selector reads queries.
        """
        ...


@runtime_checkable
class ScoringOnce(Protocol):
    """Scores each token once, by the token alone."""

    @property
    def scores_once(self) -> bool:
        """Whether a token's score depends on its key, value and position alone.

        Then `score` sees a token once, in the pass that brings it, with its key and value as the
        model computes them, before any basis; hosts store the score. Such a selector reads no
        queries, and observes attention only for `adjust`.
        """
        ...


@runtime_checkable
class ScoringLast(Protocol):
    """Scores a prompt by its last queries."""

    @property
    def scores_last(self) -> bool:
        """Whether the scores of a prompt depend on its last `observe.last` queries alone.

        `score` of a pass with at least so many queries then reads no stored score. Of a prompt in
        chunks, hosts neither observe nor score those without one of the last queries; their tokens
        are stored with a score of 0 until a later chunk is scored.
        """
        ...


@runtime_checkable
class Adjusting(Protocol):
    """Adjusts scores of single tokens by the attention that a prompt's queries give."""

    def adjust(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return the scores of all tokens after a prompt, stored and new.

        Called with `scores_once`, if the selector observes attention: after a prompt or its last
        chunk, before `plan`. The view holds the tokens' scores so far and the observations, but no
        vectors. Kept tokens keep the result, which a later turn may adjust again.
        """
        ...


@runtime_checkable
class Rescoring(Protocol):
    """Plans by other scores than the stored ones: by tokens in relation to each other."""

    def rescore(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return the scores that the next plan uses, of the tokens that are held at that time.

        Called before every `plan`, after prompts and in decoding, with one layer of the sequences
        that are planned: their tokens, the stored scores and the vectors in `reads`. The result is
        `PlanView.score` of that plan alone. It is not stored: `score`, `running` and `step` go on
        with the stored scores.
        """
        ...


@runtime_checkable
class Merging(Protocol):
    """Merges the vectors of dropped tokens into kept ones."""

    def merge(self, view: MergeView) -> Merge:
        """Return the targets and weights of the tokens that a plan drops.

        Called after every plan that drops tokens, of a prompt or again in decoding, with one layer
        of the sequences that are planned. Steps would drop tokens without it, and chunks of a
        prompt would attend to merged tokens: a selector that merges has neither.
        """
        ...


@runtime_checkable
class PlanningChunks(Protocol):
    """Plans a prompt that is not whole yet."""

    @property
    def plans_chunks(self) -> bool:
        """Whether hosts call `plan` after every chunk of a prompt, and not only after the last.

        A token's score must not change with later tokens, infinity for protected ones apart, and
        plans must add up: with pages of one token, a plan over the tokens kept so far and the new
        ones keeps what one plan over all tokens keeps. A rule of single tokens does, and so does
        a budget of tokens per head that keeps the highest scores. A share of the tokens seen does
        not, as the length of the prompt is unknown: hosts refuse a budget of another unit.

        Whole pages may be evicted at other places than by one plan, and later chunks attend to
        what earlier ones left, which changes their keys and values.
        """
        ...


@runtime_checkable
class Scoped(Protocol):
    """Plans several layers together."""

    @property
    def scope(self) -> Literal["layer", "model"]:
        """Whether `plan` sees one layer at a time or the scores of all layers."""
        ...


@runtime_checkable
class Summarizing(Protocol):
    """Passes per-head statistics to `plan`."""

    def head_stats(self, view: LayerView) -> Float[Tensor, "B H"] | None:
        """Return a per-head statistic that `plan` uses beside the scores.

        Called with the same view as `score`, after prompts.
        """
        ...


@runtime_checkable
class Replanning(Protocol):
    """Plans again during generation."""

    @property
    def replan(self) -> Replan:
        """When `plan` runs again during generation."""
        ...


@runtime_checkable
class Accumulating(Protocol):
    """Scores tokens by a mean or sum over later queries."""

    @property
    def running(self) -> Running | None:
        """The mean or sum that `score` computes during generation; None: something else.

        Hosts may update it where the scores are stored, and compute it for new tokens, whose score
        so far is 0, in place of calling `score`.
        """
        ...


@runtime_checkable
class Stepping(Protocol):
    """Decides about each generated token at its decode step."""

    def step(self, view: StepView) -> Step:
        """Place the candidate of each head and move at most one victim."""
        ...


@runtime_checkable
class Decoding(Protocol):
    """States whether `step` is called; by default it is if the selector has one."""

    @property
    def decode(self) -> Literal["grow", "step"]:
        """Whether generated tokens grow the cache or are placed by `step`."""
        ...


@runtime_checkable
class DecodingOnDevice(Protocol):
    """Decides about generated tokens without the host."""

    @property
    def decodes_on_device(self) -> bool:
        """Whether `score`, `recent_tokens` and `step` only launch work in a decode step.

        They then read no tensor's numbers on the host, and depend on nothing but the numbers in
        their view: not on earlier calls, nor on how many there were. So a host may capture them in
        a CUDA graph, and launch them again for other tokens. By default it is true where a host
        calls none of them: generated tokens grow the cache, and neither they nor their queries are
        scored.
        """
        ...


@runtime_checkable
class Moving(Protocol):
    """Moves tokens of some tiers alone in a step; by default a victim may be in any."""

    @property
    def victim_tiers(self) -> int:
        """How many tiers, from the first, have victims.

        `StepView.weakest` is inf for the others, where hosts need not search for it.
        """
        ...


@runtime_checkable
class Windowing(Protocol):
    """Protects the newest tokens from being victims of a step."""

    def recent_tokens(self, budget: Int[Tensor, " B"]) -> Int[Tensor, " B"] | None:
        """Return how many newest tokens a step never evicts; None: no such tokens."""
        ...


@runtime_checkable
class Thresholding(Protocol):
    """Passes results of a prompt's plan to `step`."""

    def tier_thresholds(self, view: PlanView) -> Float[Tensor, "K N B H"] | None:
        """Return per-head values that `step` uses, such as the score thresholds of the tiers.

        Called after `plan` with the same view, if `decode` is "step"; hosts keep the result. None:
        nothing.
        """
        ...
