"""What the packages agree on: a policy sends each token of each KV head to a tier, or drops it.

N layers, B sequences, H KV heads, G query heads per KV head, L tokens, D head dimension, K tiers.
Keys are after RoPE. Positions count the real tokens of a sequence from 0 and stay with a token when
its neighbours go; -1 marks a place that holds none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, TypeAlias, runtime_checkable

from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from kv_policy.basis import LayerBasis
from kv_policy.codec import TokenFormat
from kv_policy.shape import CacheShape, Rope

DROP: Final = 255  # the tier of a token that is let go
FRESH: Final = 254  # the tier of a token that is not stored yet
NOBODY: Final = 253  # as a step's victim: no token moves

VectorName: TypeAlias = Literal["keys", "values", "queries"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a policy's cache can and cannot do, for hosts that need more than appending."""

    shortens: bool = False  # some heads end up with fewer tokens than were seen
    shares_prefixes: bool = True  # a token's bytes do not depend on what comes after it
    rolls_back: bool = True  # the newest tokens can be taken back (speculative drafts)
    splits_heads: bool = True  # a shard of the heads decides as it would inside the whole

    def __and__(self, other: "Capabilities") -> "Capabilities":
        """Capabilities of both together."""
        return Capabilities(
            self.shortens or other.shortens,
            self.shares_prefixes and other.shares_prefixes,
            self.rolls_back and other.rolls_back,
            self.splits_heads and other.splits_heads,
        )


@dataclass(frozen=True, slots=True)
class Queries:
    """The queries of a forward pass, after RoPE, by KV head and place in its group.

    They are scaled so that q·k / sqrt(D) is the logit, whatever scale the model's attention has.
    """

    vectors: Float[Tensor, "B H G Q D"]
    position: Int[Tensor, "B Q"]  # -1: padding


@dataclass(frozen=True, slots=True)
class LayerView:
    """One layer's tokens as a selector scores them.

    After a prompt or a part of one the view holds all tokens, stored and fresh, each head's in the
    order of their positions; heads with fewer tokens have places without one (position -1) after
    their last. In decoding it holds all tokens if the policy observes generated queries, else only
    the arriving one; they come as they are stored, in no order, with empty places between them, so
    a method that looks at neighbours goes by `position`. Mass, keys and values are zero where there
    is no token.

    In decoding the view may be of several layers at once: B then counts the sequences of each, one
    layer's after another's, and a row is scored as it would be alone: `layer` says of each row
    which layer it is of. If the policy reads queries the view is of one layer, whose rotary
    embedding is `rope`.
    """

    layer: Int[Tensor, " B"]
    shape: CacheShape
    position: Int[Tensor, "B H L"]  # -1: no token here
    fresh: Bool[Tensor, "B H L"]  # arrived with this forward pass
    score: Float[Tensor, "B H L"]  # what the policy last said of a stored token; 0 for a fresh one
    length: Int[Tensor, " B"]  # tokens seen so far
    mass: Float[Tensor, "B H L"] | None = None  # as `observe` asks, from this pass alone
    seen: Int[Tensor, "B H L"] | None = None  # queries that counted into `mass`
    also: Mapping[str, Float[Tensor, "B H L"]] = field(default_factory=dict)  # the other sums
    generated: bool = False  # the fresh tokens were generated, one in each sequence
    keys: Float[Tensor, "B H L D"] | None = None  # if the policy reads keys
    values: Float[Tensor, "B H L Dv"] | None = None  # if the policy reads values
    queries: Queries | None = None  # of this pass, if the policy reads queries
    rope: Rope | None = None  # how the layer turns them and keys, if the policy reads queries


@dataclass(frozen=True, slots=True)
class PlanView:
    """The scored tokens of all layers (or of one, for a selector of scope `layer`)."""

    shape: CacheShape
    first_layer: int
    score: Float[Tensor, "N B H L"]
    position: Int[Tensor, "N B H L"]  # -1: no token here
    tier: UInt8[Tensor, "N B H L"]  # where a token is now; FRESH if it is not stored yet
    length: Int[Tensor, " B"]  # tokens seen so far
    budget: Int[Tensor, " B"]  # tokens per head, on average over the heads in view
    aside: Float[Tensor, "N B H"] | None = None  # scores of the raw window's tokens, not in view
    head_stats: Float[Tensor, "N B H"] | None = (
        None  # what `head_stats` said; None: it was not asked
    )
    # Tokens in a page of each tier, or of each tier, layer and head; None: not in pages. Always on
    # the host, so that nobody waits for it.
    page: Int[Tensor, " K"] | Int[Tensor, "K N H"] | None = None


@dataclass(frozen=True, slots=True)
class StepView:
    """A decoding step: per head one candidate, and the weakest stored token of each tier."""

    shape: CacheShape
    first_layer: int
    candidate: Float[Tensor, "N B H"]  # score of the token that leaves the raw window
    weakest: Float[Tensor, "K N B H"]  # lowest score in a tier, of those that may go; inf: none
    count: Int[Tensor, "K N B H"]  # tokens stored in a tier
    tier_thresholds: Float[
        Tensor, "K N B H"
    ]  # what `tier_thresholds` said after the last prompt; 0 if nothing
    length: Int[Tensor, " B"]
    budget: Int[Tensor, " B"]


@dataclass(frozen=True, slots=True)
class Step:
    """What a decoding step does per head; with at most one victim its work is bounded."""

    candidate: UInt8[Tensor, "N B H"]  # tier, or DROP
    victim: UInt8[Tensor, "N B H"]  # the tier whose weakest token moves, or NOBODY
    target: UInt8[Tensor, "N B H"]  # a later tier than the victim's, or DROP


@runtime_checkable
class Selector(Protocol):
    """Which tokens live, and at which tier. Pure: equal views give equal answers.

    A selector has these two methods. Each further question of a host is a protocol of its own in
    `kv_policy.optional`: a selector answers those that it has a member for, and `complete` adds the
    defaults of the others.
    """

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Say what each token is worth; higher stays. Infinity protects a token."""
        ...

    def plan(self, view: PlanView) -> UInt8[Tensor, "N B H L"]:
        """Send each token to a tier or DROP it, within the budget; drop places without a token."""
        ...


@runtime_checkable
class Formats(Protocol):
    """How each tier is stored."""

    @property
    def tiers(self) -> int:
        """K, tiers it has formats for."""
        ...

    @property
    def window(self) -> int:
        """Most recent tokens kept raw, in the model's dtype, before a tier takes them."""
        ...

    def bind(self, shape: CacheShape) -> tuple[TokenFormat, ...]:
        """Give the format of each tier for heads of this shape."""
        ...


@runtime_checkable
class Basis(Protocol):
    """A linear map in front of the codecs, with ranks that may differ per layer and head."""

    def bind(self, layer: int, shape: CacheShape) -> LayerBasis:
        """Give the maps of one layer, cut to the heads of `shape`."""
        ...


@runtime_checkable
class KVPolicy(Protocol):
    """How a cache is compressed: which tokens live, how they are stored, in which basis.

    Each facet may be absent: no selector keeps every token, no formats stores them raw in the
    model's dtype, no basis stores them as they are. `compose` joins policies that supply different
    facets into one that is again a KVPolicy. Equality and `str` go by value.
    """

    @property
    def selector(self) -> Selector | None:
        """Which tokens live, or None: all of them."""
        ...

    @property
    def formats(self) -> Formats | None:
        """How tiers are stored, or None: raw."""
        ...

    @property
    def basis(self) -> Basis | None:
        """In which basis, or None: as they are."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What a cache under this policy can do."""
        ...

    @property
    def fitted_to(self) -> str | None:
        """Fingerprint of the model it was calibrated with, or None: it serves any."""
        ...

    def __str__(self) -> str:
        """Text form, which `parse` turns back into an equal policy."""
        ...
