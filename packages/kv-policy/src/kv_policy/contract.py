"""The shared contract: a policy assigns each token of each KV head to a tier, or drops it.

N layers, B sequences, H KV heads, G query heads per KV head, L tokens, D head dimension, K tiers.
Keys are after RoPE. Positions count the real tokens of a sequence from 0 and do not change when
other tokens are evicted; -1 marks an empty slot.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, TypeAlias, runtime_checkable

from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from kv_policy.basis import LayerBasis
from kv_policy.codec import TokenFormat
from kv_policy.reading import PageReading
from kv_policy.shape import CacheShape, Rope

DROP: Final = 255  # the tier of an evicted token
FRESH: Final = 254  # the tier of a token that is not stored yet
NOBODY: Final = 253  # the victim of a step that moves no token

VectorName: TypeAlias = Literal["keys", "values", "queries"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a policy's cache supports, for hosts that do more than append."""

    shortens: bool = False  # some heads hold fewer tokens than were seen
    shares_prefixes: bool = True  # a token's bytes do not depend on what comes after it
    rolls_back: bool = True  # the newest tokens can be removed (speculative drafts)
    splits_heads: bool = True  # a shard of the heads decides as it does in the whole

    def __and__(self, other: "Capabilities") -> "Capabilities":
        """Return the capabilities of both combined."""
        return Capabilities(
            self.shortens or other.shortens,
            self.shares_prefixes and other.shares_prefixes,
            self.rolls_back and other.rolls_back,
            self.splits_heads and other.splits_heads,
        )


@dataclass(frozen=True, slots=True)
class Queries:
    """Queries of a forward pass, after RoPE, by KV head and index in its GQA group.

    They are scaled so that q·k / sqrt(D) is the logit, for any attention scale of the model.
    """

    vectors: Float[Tensor, "B H G Q D"]
    position: Int[Tensor, "B Q"]  # -1: padding


@dataclass(frozen=True, slots=True)
class LayerView:
    """Tokens of one layer or several as a selector scores them.

    After a prompt or a prefill chunk the view holds all tokens, stored and fresh, ordered by
    position within each head; heads with fewer tokens are padded at the end (position -1). In
    decoding it holds all tokens if the policy observes generated queries, else only the new token;
    tokens are in slot order, unsorted and with empty slots between them, so a method that uses
    neighbouring tokens must use `position`. Mass, keys and values are zero in empty slots.

    The view may cover several layers: B then enumerates the sequences of each layer, layer after
    layer, and `layer` holds the layer of each row; rows are scored independently. If the policy
    reads queries the view covers one layer, whose rotary embedding is `rope`.

    A selector with `scores_once` sees only the new tokens, in any pass, with keys and values as the
    model computes them, in its dtype; other selectors see float32. `shape` is the model's. Tokens
    are then in the order of the pass, and padding may come first. Its `adjust` sees all tokens
    after a prompt, without vectors.

    For `rescore` the view covers one layer of the sequences that are planned, after prompts and in
    decoding: all their tokens, those of the raw window too, ordered by position as after a prompt.
    `score` then holds the stored scores, of fresh tokens too, and vectors are those that are
    stored: coordinates, if there is a basis. There are no observations, and no queries.
    """

    layer: Int[Tensor, " B"]
    shape: CacheShape
    position: Int[Tensor, "B H L"]  # -1: empty slot
    fresh: Bool[Tensor, "B H L"]  # new in this forward pass
    score: Float[Tensor, "B H L"]  # the policy's last score of a stored token; 0 for a fresh one
    length: Int[Tensor, " B"]  # tokens seen so far
    mass: Float[Tensor, "B H L"] | None = None  # attention mass of this pass, see `observe`
    seen: Int[Tensor, "B H L"] | None = None  # queries counted in `mass`
    also: Mapping[str, Float[Tensor, "B H L"]] = field(default_factory=dict)  # the other sums
    replayed: Float[Tensor, "B H L"] | None = None  # of fresh tokens, else 0; see `replay`
    generated: bool = False  # the fresh tokens were generated, one per sequence
    keys: Float[Tensor, "B H L D"] | None = None  # if the policy reads keys
    values: Float[Tensor, "B H L Dv"] | None = None  # if the policy reads values
    queries: Queries | None = None  # of this pass, if the policy reads queries
    rope: Rope | None = None  # rotary embedding of the layer, if the policy reads queries


@dataclass(frozen=True, slots=True)
class PlanView:
    """The scored tokens of all layers (or of one, for a selector of scope `layer`)."""

    shape: CacheShape
    first_layer: int
    score: Float[Tensor, "N B H L"]
    position: Int[Tensor, "N B H L"]  # -1: empty slot
    tier: UInt8[Tensor, "N B H L"]  # current tier; FRESH if the token is not stored yet
    length: Int[Tensor, " B"]  # tokens seen so far
    budget: Int[Tensor, " B"]  # tokens per head, on average over the heads in view
    aside: Float[Tensor, "N B H"] | None = (
        None  # total stored score of the raw window, which is not in the view
    )
    head_stats: Float[Tensor, "N B H"] | None = (
        None  # the result of `head_stats`; None: not computed
    )
    stored_score: Float[Tensor, "N B H L"] | None = (
        None  # if `score` is the result of `rescore`; None: `score` is stored
    )
    # Tokens per page of each tier, or of each tier, layer and head; None: not paged. Always on the
    # CPU, so that reading it does not synchronize.
    page: Int[Tensor, " K"] | Int[Tensor, "K N H"] | None = None


@dataclass(frozen=True, slots=True)
class MergeView:
    """One layer's tokens that a plan keeps or drops, ordered by position, as `merge` sees them.

    Sequences are those that are planned; heads with fewer tokens are padded at the end. Tokens of
    the raw window are not in the view. Vectors are those that are stored, in float32: coordinates,
    if there is a basis.
    """

    layer: Int[Tensor, " B"]
    shape: CacheShape
    position: Int[Tensor, "B H L"]  # -1: empty slot
    kept: Bool[Tensor, "B H L"]  # by the plan; the other tokens are dropped
    score: Float[Tensor, "B H L"]  # the stored scores
    length: Int[Tensor, " B"]  # tokens seen so far
    threshold: Float[Tensor, "B H"]  # of the head's last merge; 0 before the first
    keys: Float[Tensor, "B H L D"]
    values: Float[Tensor, "B H L Dv"]

    @property
    def dropped(self) -> Bool[Tensor, "B H L"]:
        """The tokens that the plan drops."""
        return (self.position >= 0) & ~self.kept


@dataclass(frozen=True, slots=True)
class Merge:
    """Where the vectors of dropped tokens go: into up to M kept tokens of their head each.

    A kept token's vectors become `own` times themselves plus, for each dropped token that targets
    it, `weight` times that token's. Its score, its position and its tier stay. Tokens whose vectors
    do not change keep their bytes, as do all in heads that drop no token.
    """

    target: Int[Tensor, "B H L M"]  # index of a kept token; any where the weight is 0
    weight: Float[Tensor, "B H L M"]  # of dropped tokens; those of others are ignored
    own: Float[Tensor, "B H L"] | None = None  # of kept tokens; None: 1
    threshold: Float[Tensor, "B H"] | None = None  # for the head's next merge; None: as before
    keys: bool = True  # whether keys are merged as values are


@dataclass(frozen=True, slots=True)
class StepView:
    """A decode step: one candidate per head, and the weakest stored token of each tier."""

    shape: CacheShape
    first_layer: int
    candidate: Float[Tensor, "N B H"]  # score of the token that leaves the raw window
    weakest: Float[Tensor, "K N B H"]  # lowest score in a tier among evictable tokens; inf: none
    count: Int[Tensor, "K N B H"]  # tokens stored in a tier
    tier_thresholds: Float[
        Tensor, "K N B H"
    ]  # the result of `tier_thresholds` after the last prompt; 0 without one
    length: Int[Tensor, " B"]
    budget: Int[Tensor, " B"]


@dataclass(frozen=True, slots=True)
class Step:
    """Decision of a decode step per head; at most one victim bounds the work."""

    candidate: UInt8[Tensor, "N B H"]  # tier, or DROP
    victim: UInt8[Tensor, "N B H"]  # the tier whose weakest token moves, or NOBODY
    target: UInt8[Tensor, "N B H"]  # a later tier than the victim's, or DROP


@runtime_checkable
class Selector(Protocol):
    """Selects the tokens to keep and their tiers. Pure: equal views give equal results.

    A selector has these two methods. Every optional member has a protocol of its own in
    `kv_policy.optional`; `complete` adds the defaults of missing members.
    """

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return the score of each token; higher is kept. Infinity protects a token."""
        ...

    def plan(self, view: PlanView) -> UInt8[Tensor, "N B H L"]:
        """Assign each token to a tier or DROP it, within the budget; DROP empty slots."""
        ...


@runtime_checkable
class Formats(Protocol):
    """Storage formats of the tiers."""

    @property
    def tiers(self) -> int:
        """K, the number of tiers with a format."""
        ...

    @property
    def window(self) -> int:
        """Most recent tokens kept raw, in the model's dtype, before they enter a tier."""
        ...

    def bind(self, shape: CacheShape) -> tuple[TokenFormat, ...]:
        """Return the format of each tier for heads of this shape."""
        ...


@runtime_checkable
class Basis(Protocol):
    """A linear map applied before the codecs, with ranks that may differ per layer and head."""

    def bind(self, layer: int, shape: CacheShape) -> LayerBasis:
        """Return the maps of one layer, restricted to the heads of `shape`."""
        ...


@runtime_checkable
class KVPolicy(Protocol):
    """How a cache is compressed: token selection, storage formats and basis.

    Each facet is optional: without a selector every token is kept, without formats tokens are
    stored raw in the model's dtype, without a basis vectors are stored unprojected, and without a
    reading each decode step reads every stored token. `compose` joins policies with different
    facets into one KVPolicy. Equality and `str` are by value.
    """

    @property
    def selector(self) -> Selector | None:
        """Token selection, or None: every token is kept."""
        ...

    @property
    def formats(self) -> Formats | None:
        """Storage formats of the tiers, or None: raw."""
        ...

    @property
    def basis(self) -> Basis | None:
        """Basis of the stored vectors, or None: unprojected."""
        ...

    @property
    def reading(self) -> PageReading | None:
        """The pages that a decode step reads, or None: all."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What a cache under this policy supports."""
        ...

    @property
    def fitted_to(self) -> str | None:
        """Fingerprint of the model it was calibrated with, or None: it fits any model."""
        ...

    def __str__(self) -> str:
        """Return the text form, which `parse` turns back into an equal policy."""
        ...
