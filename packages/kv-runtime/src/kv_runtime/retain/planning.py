"""Build a selector's views from stored and new tokens, and convert its plan back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from kv_paging import PerHeadRankStore, TokenStore
from kv_policy import (
    DROP,
    FRESH,
    CacheShape,
    CompleteSelector,
    LayerView,
    PlanView,
    Queries,
    VectorName,
)
from kv_runtime.batch import Pass
from kv_runtime.retain.answers import expect_plan, expect_rescored, expect_scores, lacks_numbers


@dataclass(frozen=True)
class Group:
    """The tokens of layers in one place: a tier, the window, or the new tokens.

    B indexes sequences, grouped by layer.
    """

    position: Int[Tensor, "B H S"]  # -1: no token
    tier: int  # index of the tier, or FRESH
    fresh: bool
    store: TokenStore | PerHeadRankStore | None = None  # None: in the window, or not stored yet
    score: Float[Tensor, "B H S"] | None = None
    mass: Float[Tensor, "B H S"] | None = None
    seen: Int[Tensor, "B H S"] | None = None
    also: Mapping[str, Float[Tensor, "B H S"]] = field(default_factory=dict)
    key: Float[Tensor, "B H S D"] | None = None
    value: Float[Tensor, "B H S Dv"] | None = None

    def of(self, rows: Int[Tensor, " D"] | slice, *, vectors: bool = False) -> "Group":
        """Return some rows, with the fields that a plan needs; its vectors if they are wanted."""

        def taken(x: Tensor | None, wanted: bool = True) -> Tensor | None:
            return None if x is None or not wanted else x[rows]

        return Group(
            position=self.position[rows],
            tier=self.tier,
            fresh=self.fresh,
            store=self.store,
            score=taken(self.score),
            key=taken(self.key, vectors),
            value=taken(self.value, vectors),
        )


@dataclass(frozen=True)
class Scored:
    """Tokens of layers with their selector's scores, usually in the order of positions."""

    groups: tuple[Group, ...]
    order: Int[Tensor, "B H L"] | None  # index into the concatenated groups; None: identity
    position: Int[Tensor, "B H L"]
    score: Float[Tensor, "B H L"]
    head_stats: Float[Tensor, "B H"] | None = None  # from the selector, if it computes any
    wrong: Bool[Tensor, ""] | None = None  # whether scores of a prompt are NaN

    @classmethod
    def carried(cls, groups: Sequence[Group]) -> "Scored":
        """Use the stored scores, without calling the selector."""
        order = _order(groups)
        score = _joined(order, [_carried_score(g) for g in groups])
        position = _joined(order, [g.position for g in groups])
        return cls(tuple(groups), order, position, score)

    @property
    def tier(self) -> UInt8[Tensor, "B H L"]:
        """The current tier of each token."""
        each = [torch.full_like(g.position, g.tier, dtype=torch.uint8) for g in self.groups]
        return _joined(self.order, each)

    @property
    def fresh(self) -> Bool[Tensor, "B H L"]:
        """Whether each token is new in its pass."""
        each = [torch.full_like(g.position, g.fresh, dtype=torch.bool) for g in self.groups]
        return _joined(self.order, each)

    def vectors(self, name: VectorName) -> Float[Tensor, "B H L _"]:
        """The keys or values of the tokens, which the groups have; zero in empty slots."""
        parts = [g.key if name == "keys" else g.value for g in self.groups]
        return _vectors(self.order, parts).masked_fill((self.position < 0)[..., None], 0)

    @property
    def bare(self) -> "Scored":
        """The same tokens without vectors and observations, whose memory is free then."""
        return replace(self, groups=tuple(group.of(slice(None)) for group in self.groups))

    def of(self, rows: Int[Tensor, " D"] | slice) -> "Scored":
        """Return some rows."""
        order = None if self.order is None else self.order[rows]
        groups = tuple(group.of(rows, vectors=True) for group in self.groups)
        stats = None if self.head_stats is None else self.head_stats[rows]
        return Scored(groups, order, self.position[rows], self.score[rows], stats)

    def by_layer(self, layers: int) -> list["Scored"]:
        """Split rows that are grouped by layer."""
        each = len(self.position) // layers
        return [self.of(slice(i * each, (i + 1) * each)) for i in range(layers)]

    def joined(self, parts: list[Tensor]) -> Tensor:
        """Concatenate what each group has of its tokens, in this order."""
        return _joined(self.order, parts)

    def split_vectors(self, x: Float[Tensor, "B H L D"]) -> list[Float[Tensor, "B H _ D"]]:
        """Split vectors in this order by group."""
        sizes = [g.position.shape[-1] for g in self.groups]
        if self.order is not None:
            order = self.order[..., None].expand_as(x)
            x = torch.empty_like(x).scatter_(-2, order, x)
        return list(x.split(sizes, -2))

    def split(self, x: Tensor) -> list[Tensor]:
        """Split a result in this order by group."""
        sizes = [g.position.shape[-1] for g in self.groups]
        if self.order is not None:
            x = torch.empty_like(x).scatter_(-1, self.order, x)
        return list(x.split(sizes, -1))


def score_layers(
    selector: CompleteSelector,
    layers: slice,
    shape: CacheShape,
    groups: Sequence[Group],
    now: Pass,
    queries: Queries | None = None,
    replayed: Float[Tensor, "B H _"] | None = None,
) -> Scored:
    """Concatenate the groups, in a prompt sorted by position, and score them with the selector.

    Tokens that are scored once are not sorted, as none depends on another, and their vectors stay
    in the model's dtype; others are in float32.

    Args:
        selector: the selector.
        layers: the layers; a single one in a prompt whose vectors are read.
        shape: the shape of the cache.
        groups: the tokens of these layers.
        now: the pass, over these layers.
        queries: the queries of the pass, over these layers.
        replayed: of the last group, the new tokens; see `LayerView.replayed`.
    """
    once = selector.scores_once
    order = _order(groups) if now.is_prefill and not once else None
    view = _view(layers, shape, groups, order, now, selector.reads, queries, replayed, plain=once)
    score = expect_scores(selector, view, selector.score(view))
    head_stats = selector.head_stats(view) if now.is_prefill else None
    wrong = lacks_numbers(view, score) if now.is_prefill else None
    return Scored(tuple(groups), order, view.position, score, head_stats, wrong)


def adjust_layers(
    selector: CompleteSelector, layers: slice, shape: CacheShape, scored: Scored, now: Pass
) -> Scored:
    """Adjust scores that tokens got once by the attention of a prompt, if the selector does."""
    if selector.adjust is None:
        return scored
    groups = [
        replace(group, score=score)
        for group, score in zip(scored.groups, scored.split(scored.score), strict=True)
    ]
    view = _view(layers, shape, groups, scored.order, now, frozenset())
    score = expect_scores(selector, view, selector.adjust(view), "adjust")
    wrong = lacks_numbers(view, score)
    return replace(
        scored, score=score, wrong=wrong if scored.wrong is None else scored.wrong | wrong
    )


def rescored(
    selector: CompleteSelector,
    layer: int,
    shape: CacheShape,
    scored: Scored,
    length: Int[Tensor, " B"],
) -> Float[Tensor, "B H L"]:
    """Return the scores that one plan uses for a layer: of `rescore`, or else those stored.

    The tokens are in the order of positions; their groups have the vectors that are read.

    Raises:
        ValueError: the selector returns something else than scores.
    """
    if selector.rescore is None:
        return scored.score
    view = LayerView(
        layer=torch.full_like(length, layer),
        shape=shape,
        position=scored.position,
        fresh=scored.fresh,
        score=scored.score,
        length=length,
        keys=scored.vectors("keys") if "keys" in selector.reads else None,
        values=scored.vectors("values") if "values" in selector.reads else None,
    )
    return expect_rescored(selector, view, selector.rescore(view))


def _view(
    layers: slice,
    shape: CacheShape,
    groups: Sequence[Group],
    order: Int[Tensor, "B H L"] | None,
    now: Pass,
    reads: frozenset[VectorName],
    queries: Queries | None = None,
    replayed: Float[Tensor, "B H _"] | None = None,
    *,
    plain: bool = False,
) -> LayerView:
    """Return the groups' tokens in one view, in the given order; `plain`: vectors as they are."""
    joined, vectors = partial(_joined, order), partial(_vectors, order, plain=plain)
    observed = all(g.mass is not None for g in groups)
    lead, device = groups[0].position.shape[:-1], groups[0].position.device
    each = [torch.full(g.position.shape[-1:], g.fresh, device=device) for g in groups]
    fresh = (each[0] if len(each) == 1 else torch.cat(each)).expand(*lead, -1)
    layer = torch.arange(layers.start, layers.stop, device=device)[:, None]
    return LayerView(
        layer=layer.expand(-1, lead[0] // len(layer)).flatten(),
        shape=shape,
        position=joined([g.position for g in groups]),
        fresh=fresh if order is None else fresh.gather(-1, order),
        score=joined([_carried_score(g) for g in groups]),
        length=now.total,
        mass=joined([g.mass.float() for g in groups if g.mass is not None]) if observed else None,
        seen=joined([g.seen for g in groups if g.seen is not None]) if observed else None,
        also={name: joined([g.also[name] for g in groups]) for name in groups[-1].also},
        replayed=None if replayed is None else joined([*_zeros(groups[:-1]), replayed.float()]),
        generated=not now.is_prefill,
        keys=vectors([g.key for g in groups]) if "keys" in reads else None,
        values=vectors([g.value for g in groups]) if "values" in reads else None,
        queries=queries if "queries" in reads else None,
        rope=shape.rope_of(layers.start) if "queries" in reads else None,
    )


def _joined(order: Tensor | None, parts: list[Tensor]) -> Tensor:
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return whole if order is None else whole.gather(-1, order)


def _vectors(order: Tensor | None, parts: list[Tensor | None], *, plain: bool = False) -> Tensor:
    each = [p if plain else p.float() for p in parts if p is not None]
    whole = each[0] if len(each) == 1 else torch.cat(each, -2)
    if order is None:
        return whole
    return whole.gather(-2, order[..., None].expand(*order.shape, whole.shape[-1]))


def _order(groups: Sequence[Group]) -> Int[Tensor, "B H L"] | None:
    """Return the indices that sort tokens by position, empty slots last; None: they are sorted."""
    position = torch.cat([g.position for g in groups], -1)
    place = position.masked_fill(position < 0, torch.iinfo(position.dtype).max)
    if place.device.type == "cpu" and bool((place[..., 1:] >= place[..., :-1]).all()):
        return None  # a device would be waited for
    return place.argsort(dim=-1, stable=True)


def _carried_score(group: Group) -> Float[Tensor, "B H S"]:
    return _zeros([group])[0] if group.score is None else group.score


def _zeros(groups: Sequence[Group]) -> list[Float[Tensor, "B H S"]]:
    return [torch.zeros_like(group.position, dtype=torch.float32) for group in groups]


def plan_layers(
    selector: CompleteSelector,
    shape: CacheShape,
    first_layer: int,
    scored: Sequence[Scored],
    length: Int[Tensor, " B"],
    budget: Int[Tensor, " B"],
    window: int,
    page: Int[Tensor, "K n H"],
    due: Int[Tensor, " D"] | None,
) -> tuple[list[list[UInt8[Tensor, "B H S"]]], Float[Tensor, "K n _ H"] | None]:
    """Plan some layers together; return each group's tiers by layer, and the plan's thresholds.

    The thresholds are those of the due sequences.

    Tokens in a raw window of `window` tokens are hidden from the plan, as they are kept in addition
    to the budget. Sequences that are not `due` (None: all are) keep every token.
    """
    width = max(s.position.shape[-1] for s in scored)

    def split(plan: UInt8[Tensor, "n B H L"]) -> list[list[UInt8[Tensor, "B H _"]]]:
        return [s.split(plan[i, ..., : s.position.shape[-1]]) for i, s in enumerate(scored)]

    if due is not None and not len(due):
        return split(stay(scored, length, window)), None
    rows = slice(None) if due is None else due

    def stack(parts: list[Tensor], fill: int | float) -> Tensor:
        return torch.stack(
            [torch.nn.functional.pad(p, (0, width - p.shape[-1]), value=fill) for p in parts]
        )

    stored = stack([s.score[rows] for s in scored], 0.0)
    score = stored
    if selector.rescore is not None:
        each = [
            rescored(selector, first_layer + i, shape, s.of(rows), length[rows])
            for i, s in enumerate(scored)
        ]
        score = stack(each, 0.0)
    stats = [s.head_stats[rows] for s in scored if s.head_stats is not None]
    view = PlanView(
        shape=shape,
        first_layer=first_layer,
        score=score,
        position=stack([s.position[rows] for s in scored], -1),
        tier=stack([s.tier[rows] for s in scored], DROP),
        length=length[rows],
        budget=budget[rows],
        head_stats=torch.stack(stats) if len(stats) == len(scored) else None,
        stored_score=None if selector.rescore is None else stored,
        page=page,
    )
    plan, tier_thresholds = planned(selector, view, window)
    if due is not None:
        plan = stay(scored, length, window).index_copy(1, due, plan)
    return split(plan), tier_thresholds


def planned(
    selector: CompleteSelector, view: PlanView, window: int
) -> tuple[UInt8[Tensor, "N B H L"], Float[Tensor, "K N B H"] | None]:
    """Plan all tokens outside the raw window; return the plan and the selector's thresholds."""
    if window:
        held_raw = view.position >= (view.length - window).clamp(min=0)[None, :, None, None]
        stored = view.score if view.stored_score is None else view.stored_score
        view = replace(
            view,
            position=view.position.masked_fill(held_raw, -1),
            aside=stored.masked_fill(~held_raw, 0).sum(-1),
        )
    plan = expect_plan(selector, view, selector.plan(view))
    plan = torch.where(view.position >= 0, plan, DROP)
    if selector.decode == "grow":
        return plan, None
    tier_thresholds = selector.tier_thresholds(view)
    if tier_thresholds is None:
        tier_thresholds = view.score.new_zeros(selector.tiers, *view.score.shape[:-1])
    return plan, tier_thresholds


def stay(
    scored: Sequence[Scored], length: Int[Tensor, " B"], window: int
) -> UInt8[Tensor, "n B H L"]:
    """Return the plan that keeps stored tokens in place and stores new ones in the first tier."""
    width = max(s.position.shape[-1] for s in scored)
    oldest_raw = (length - window)[:, None, None] if window else length[:, None, None] + 1

    def one(s: Scored) -> Tensor:
        tier = torch.where(s.tier == FRESH, 0, s.tier)
        tier = tier.masked_fill((s.position < 0) | (s.position >= oldest_raw), DROP)
        return torch.nn.functional.pad(tier, (0, width - tier.shape[-1]), value=DROP)

    return torch.stack([one(s) for s in scored])
