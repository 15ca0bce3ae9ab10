"""Gate: what to keep, predicted from each key and value alone."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, ClassVar, Final, Literal

import torch
from jaxtyping import Float, UInt8
from msgspec import Meta
from torch import Tensor

from kv_evict.gate_file import GateWeights, load
from kv_evict.gate_threshold import GateThreshold
from kv_evict.pooling import expect_odd, pool
from kv_evict.schedule import cheapest_pages
from kv_policy import Capabilities, Evictor, LayerView, Observe, PlanView, Replan, Selector

_NEAR: Final = 21  # neighbouring positions whose observed attention counts, as in kv-compress
# What has no effect beside a threshold; a share sets one itself.
_OF_BUDGETS: Final = (
    "budget",
    "layers",
    "pool",
    "window",
    "every",
    "uncompressed",
    "short",
    "most",
    "chunks",
    "share",
)


@dataclass(frozen=True)
class Gate(Evictor):
    """Keep the tokens that a small network per KV head predicts to be needed, in one budget.

    KVzip scores a token by the largest attention probability that any query gives it while the
    model repeats the text: it needs no question, but reads everything twice. A network with one
    hidden layer predicts the logarithm of that score from what a head stores: the key before RoPE,
    the norms of its pairs of dimensions, the value, and the norms of both. A token is scored once,
    when it arrives; neither queries nor later tokens change its score, so a prompt is compressed
    without the question that will be asked about it.

    All layers and heads share one budget, and the cheapest pages are evicted, as in KV-Compress
    (section 4.2.2); `layers=even` gives every layer the same. Scores are maximized over `pool`
    neighbouring stored tokens when a plan is made. The first `sinks` and the newest `recent` tokens
    are always kept. With `every`, `uncompressed` or `short` tokens are evicted during generation as
    well, by the same scores.

    With `chunks` the plan follows each prefill chunk of a prompt, and not only the last, so that a
    prompt never has to fit uncompressed. As scores do not change, the highest of the tokens kept so
    far and of the new ones are the highest of all, up to whole pages. But later chunks attend to
    what is left of earlier ones, so their keys and values, and with them their scores, are not
    those of a prompt that is planned once. The budget is then a number of tokens, as the length of
    the prompt is not known.

    With a `window` the score of an older token is raised to `weight` times the attention that the
    last `window` queries of the prompt give it, if that is larger: the norm of their probabilities
    over the query heads of its KV head, maximized over 21 neighbouring positions, as KV-Compress
    observes it. A question at the end of the prompt then keeps what it asks for.

    With a `threshold` there is no budget: a token is kept if its score reaches it. Each head then
    decides for itself, and a prompt that is read in parts is compressed part by part. `share` sets
    the threshold that this share of the tokens of the calibration's texts exceeded. While
    generating, a token below the threshold is evicted when it is no longer among the `recent`.

    `file` is written by `kv-serve calibrate gate`, or the name of a gate in this package. It
    belongs to one model.
    """

    name: ClassVar[str] = "gate"
    source: ClassVar[str] = (
        "target: KVzip, Kim et al., 2025, https://arxiv.org/abs/2505.23416; the prediction is ours"
    )
    reads = frozenset({"keys", "values"})
    needs_rope = True
    scores_once = True

    file: Annotated[
        str, Meta(min_length=1, description="output of kv-serve calibrate gate, or a shipped gate")
    ] = field(kw_only=True)
    layers: Annotated[
        Literal["free", "even"], Meta(description="free: layer budgets may differ; even: equal")
    ] = "free"
    sinks: Annotated[int, Meta(ge=0, description="first tokens, always kept")] = 0
    recent: Annotated[int, Meta(ge=0, description="newest tokens, always kept")] = 8
    pool: Annotated[int, Meta(ge=1, description="neighbouring positions to max-pool over; odd")] = 1
    window: Annotated[
        int, Meta(ge=0, description="last queries of the prompt to observe; 0: none")
    ] = 0
    weight: Annotated[
        float, Meta(gt=0, description="factor of the observed attention, with a window")
    ] = 3.0
    every: Annotated[int, Meta(ge=0, description="generated tokens between plans; 0: none")] = 0
    uncompressed: Annotated[
        int, Meta(ge=0, description="new tokens of the batch that start a plan; 0: never")
    ] = 0
    short: Annotated[bool, Meta(description="plan when the pool has no free page")] = False
    most: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="maximum tokens per plan, over layers and heads"),
    ] = None
    chunks: Annotated[
        bool, Meta(description="plan after each prefill chunk, for prompts that do not fit whole")
    ] = False
    threshold: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(description="score from which a token is kept, instead of a budget"),
    ] = None
    share: Annotated[
        Annotated[float, Meta(gt=0, lt=1)] | None,
        Meta(description="threshold by the share of calibration tokens that exceed it"),
    ] = None

    def __post_init__(self) -> None:
        """Check the parameters and load the gate.

        Raises:
            NotCalibratedError: the file does not exist.
            ValueError: a budget below the protected tokens, an even `pool`, a weight without a
                window, `chunks` with a share, with `pool` or with `window`, a threshold beside what
                belongs to a budget, or a file that is damaged or no gate.
        """
        super().__post_init__()
        expect_odd(self.name, self.pool)
        if not self.window and self.weight != type(self).weight:
            raise ValueError(
                f"{self.name}: weight={self.weight} is a factor of what a window observes, and "
                "there is none; add window=8, or omit the weight"
            )
        if self.chunks and self.pool > 1:
            raise ValueError(
                f"{self.name}: pool={self.pool} compares a token with its neighbours, of which a "
                "chunk lacks the later ones; omit pool or chunks"
            )
        if self.chunks and self.window:
            raise ValueError(
                f"{self.name}: the window={self.window} last queries may ask for tokens that an "
                "earlier chunk evicted; omit window or chunks"
            )
        if self._limit is None:
            return
        given = "threshold" if self.threshold is not None else "share"
        for other in _OF_BUDGETS:
            default = type(self).__dataclass_fields__[other].default
            if other != given and getattr(self, other) != default:
                raise ValueError(
                    f"{self.name}: {given} decides token by token, so {other}="
                    f"{getattr(self, other)} has no effect; omit one of the two"
                )

    @cached_property
    def _gate(self) -> GateWeights:
        return load(self.file)

    @property
    def _limit(self) -> float | None:
        """The threshold, if there is one; the file is loaded in any case."""
        gate = self._gate
        return self.threshold if self.share is None else gate.threshold(self.share)

    @property
    def selector(self) -> Selector:
        """This method, or its rule for single tokens."""
        limit = self._limit
        if limit is None:
            return self
        return GateThreshold(self._gate, limit, self.sinks, self.recent)

    @property
    def fitted_to(self) -> str:
        """Fingerprint of the calibrated model."""
        return self._gate.facts.fingerprint

    @property
    def plans_chunks(self) -> bool:
        """If `chunks` is set."""
        return self.chunks

    @property
    def scope(self) -> Literal["layer", "model"]:
        """All layers share one budget, unless `layers=even`."""
        return "model" if self.layers == "free" else "layer"

    @property
    def capabilities(self) -> Capabilities:
        """Heads share a budget even where layers do not, so a shard of them decides differently."""
        return replace(super().capabilities, splits_heads=self._limit is not None)

    @property
    def observe(self) -> Observe:
        """The last queries of a prompt, if there is a window."""
        return Observe(last=self.window, group="sum", power=2) if self.window else Observe()

    @property
    def replan(self) -> Replan:
        """Replanning as the parameters set it."""
        return Replan(self.every, self.uncompressed, self.short, self.most)

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return the predicted attention probability of each new token.

        Raises:
            ValueError: layers, heads or dimensions differ from the calibrated model.
        """
        return self._gate.score(view)

    def adjust(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return the larger of a token's score and what the last queries observed."""
        assert view.mass is not None  # it is observed
        seen = (view.position >= 0) & (view.position < view.length[:, None, None] - self.window)
        observed = pool(view.mass.sqrt(), view.position, seen, _NEAR, "max")
        return torch.where(seen, torch.maximum(view.score, self.weight * observed), view.score)

    def plan(self, view: PlanView) -> UInt8[Tensor, "N B H L"]:
        """Evict the cheapest pages of all layers in view, until the budget is met."""
        if self.pool > 1:
            score, position = view.score.flatten(0, 1), view.position.flatten(0, 1)
            pooled = pool(score, position, position >= 0, self.pool, "max")
            view = replace(view, score=pooled.view_as(view.score))
        return cheapest_pages(view, sinks=self.sinks, recent=self.recent)
