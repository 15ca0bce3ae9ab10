"""Selectors with a value or a default for every optional member, as hosts use them."""

from collections.abc import Callable
from typing import Literal

from jaxtyping import Float, Int, UInt8
from torch import Tensor

from kv_policy.contract import (
    LayerView,
    Merge,
    MergeView,
    PlanView,
    Selector,
    Step,
    StepView,
    VectorName,
)
from kv_policy.lifecycle import Observe, Replan
from kv_policy.optional import (
    Accumulating,
    Adjusting,
    Budgeted,
    Decoding,
    DecodingOnDevice,
    Merging,
    Moving,
    Observing,
    PlanningChunks,
    Protecting,
    Reading,
    Replanning,
    Replaying,
    Rescoring,
    Rotating,
    Scoped,
    ScoringLast,
    ScoringOnce,
    Stepping,
    Summarizing,
    Thresholding,
    Tiered,
    Windowing,
)


class CompleteSelector:
    """A selector with every optional member: its own or the default.

    Constants are read once, at construction; methods are the selector's own. The result satisfies
    the `Selector` protocol itself.
    """

    score: Callable[[LayerView], Float[Tensor, "B H L"]]
    adjust: Callable[[LayerView], Float[Tensor, "B H L"]] | None  # None: nothing is adjusted
    rescore: Callable[[LayerView], Float[Tensor, "B H L"]] | None  # None: plans use stored scores
    plan: Callable[[PlanView], UInt8[Tensor, "N B H L"]]
    merge: Callable[[MergeView], Merge] | None  # None: dropped tokens leave nothing
    head_stats: Callable[[LayerView], Float[Tensor, "B H"] | None]
    tier_thresholds: Callable[[PlanView], Float[Tensor, "K N B H"] | None]
    recent_tokens: Callable[[Int[Tensor, " B"]], Int[Tensor, " B"] | None]
    step: Callable[[StepView], Step]

    def __init__(self, selector: Selector) -> None:
        """Read the selector's members.

        Raises:
            TypeError: `decode` is "step" and the selector has no `step`; or it scores tokens once,
                and by more than the token; or it adjusts scores that it does not give once; or it
                plans chunks of prompts by scores that change; or it merges tokens, and drops some
                at steps or with chunks of prompts; or it scores by the last queries, without a
                number of these, once, or with chunks of prompts.
            ValueError: it plans chunks of prompts, and its budget is a share of the prompt.
        """
        self.selector = selector
        self.tiers = selector.tiers if isinstance(selector, Tiered) else 1
        self.budget = selector.budget if isinstance(selector, Budgeted) else None
        self.protected = selector.protected if isinstance(selector, Protecting) else 0
        self.observe = selector.observe if isinstance(selector, Observing) else Observe()
        self.replay = selector.replay if isinstance(selector, Replaying) else None
        nothing: frozenset[VectorName] = frozenset()
        self.reads = selector.reads if isinstance(selector, Reading) else nothing
        asks = "queries" in self.reads
        self.needs_rope = selector.needs_rope if isinstance(selector, Rotating) else asks
        self.scores_once = selector.scores_once if isinstance(selector, ScoringOnce) else False
        self.scores_last = selector.scores_last if isinstance(selector, ScoringLast) else False
        chunks = selector.plans_chunks if isinstance(selector, PlanningChunks) else False
        self.plans_chunks: bool = chunks
        self.scope = selector.scope if isinstance(selector, Scoped) else "layer"
        self.replan = selector.replan if isinstance(selector, Replanning) else Replan()
        self.running = selector.running if isinstance(selector, Accumulating) else None
        self.score, self.plan = selector.score, selector.plan
        self.rescore = selector.rescore if isinstance(selector, Rescoring) else None
        self.head_stats = selector.head_stats if isinstance(selector, Summarizing) else _nothing
        self.tier_thresholds = (
            selector.tier_thresholds if isinstance(selector, Thresholding) else _nothing
        )
        self.recent_tokens = selector.recent_tokens if isinstance(selector, Windowing) else _nothing
        self.step = selector.step if isinstance(selector, Stepping) else _no_step
        steps: Literal["grow", "step"] = "step" if isinstance(selector, Stepping) else "grow"
        self.decode = selector.decode if isinstance(selector, Decoding) else steps
        if self.decode == "step" and steps == "grow":
            raise TypeError(
                f"{type(selector).__name__} has decode='step' but no step(view); define it, "
                "or set decode='grow'"
            )
        idle = self.decode == "grow" and not (self.scores_once or self.observe.generated)
        declared = isinstance(selector, DecodingOnDevice) and selector.decodes_on_device
        self.decodes_on_device = idle or declared
        self.victim_tiers = selector.victim_tiers if isinstance(selector, Moving) else self.tiers
        adjust = selector.adjust if isinstance(selector, Adjusting) else None
        self.adjust = adjust if self.observe != Observe() else None
        if self.adjust is not None and not self.scores_once:
            raise TypeError(
                f"{type(selector).__name__} has adjust(view), but scores_once is False; "
                "score(view) then sees the attention itself"
            )
        self.merge = selector.merge if isinstance(selector, Merging) else None
        if self.merge is not None:
            self._expect_plans_alone()
        if self.scores_once:
            self._expect_tokens_alone()
        if self.plans_chunks:
            self._expect_chunks_add_up()
        if self.scores_last:
            self._expect_last_queries()

    def _expect_last_queries(self) -> None:
        for what, found in (
            ("observes all queries of a prompt", self.observe.last is None),
            ("observes no query of a prompt", self.observe.last == 0),
            ("scores_once=True", self.scores_once),
            ("plans_chunks=True", self.plans_chunks),
        ):
            if found:
                raise TypeError(
                    f"{type(self.selector).__name__} has scores_last=True and {what}; scores that "
                    "depend on the last queries of a prompt need a number of these, "
                    "`observe.last`, and are known at its end"
                )

    def _expect_plans_alone(self) -> None:
        for what, found in (
            ("decode='step'", self.decode == "step"),
            ("plans_chunks=True", self.plans_chunks),
        ):
            if found:
                raise TypeError(
                    f"{type(self.selector).__name__} has merge(view) and {what}; tokens are merged "
                    "when a plan of a whole sequence drops them: after prompts, and in decoding as "
                    "`replan` says"
                )

    def _expect_chunks_add_up(self) -> None:
        if self.budget is not None:
            self.budget.expect_tokens(type(self.selector).__name__)
        for method, own in (("adjust", self.adjust), ("rescore", self.rescore)):
            if own is not None:
                raise TypeError(
                    f"{type(self.selector).__name__} has plans_chunks=True and {method}(view); "
                    "tokens that a chunk evicted cannot get another score"
                )

    def _expect_tokens_alone(self) -> None:
        more = {
            "observes attention": self.observe != Observe() and self.adjust is None,
            "observes generated queries": self.observe.generated,
            "reads queries": "queries" in self.reads,
            "has a running score": self.running is not None,
        }
        for what, found in more.items():
            if found:
                raise TypeError(
                    f"{type(self.selector).__name__} has scores_once=True and {what}; a score that "
                    "is computed once depends on key, value and position alone"
                )


def _nothing(view: object) -> None:
    """Return None: the default of the optional methods."""


def _no_step(view: StepView) -> Step:
    raise TypeError("the selector has no step(view); its generated tokens grow the cache")


def complete(selector: Selector) -> CompleteSelector:
    """Wrap a selector so that every optional member has a value; return a complete one unchanged.

    Raises:
        TypeError, ValueError: see `CompleteSelector`.
    """
    return selector if isinstance(selector, CompleteSelector) else CompleteSelector(selector)
