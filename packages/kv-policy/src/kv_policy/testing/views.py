"""Random ragged batches from seeds, for checks of selectors."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from kv_policy.complete import CompleteSelector
from kv_policy.contract import DROP, FRESH, LayerView, MergeView, PlanView, Queries, StepView
from kv_policy.lifecycle import Observe
from kv_policy.shape import CacheShape

_SPARE = (40, 17, 1, 0)  # tokens of each sequence beyond the protected; the last two are short


@dataclass(frozen=True)
class DrawnTokens:
    """Tokens of all layers, sorted by position within each head, then padding."""

    shape: CacheShape
    length: Int[Tensor, " B"]
    budget: Int[Tensor, " B"]
    page: Int[Tensor, " K"]
    position: Int[Tensor, "N B H L"]
    fresh: Bool[Tensor, "N B H L"]
    tier: UInt8[Tensor, "N B H L"]
    score: Float[Tensor, "N B H L"]
    mass: Float[Tensor, "N B H L"] | None
    seen: Int[Tensor, "N B H L"] | None
    also: dict[str, Float[Tensor, "N B H L"]]
    replayed: Float[Tensor, "N B H L"] | None
    generated: bool
    keys: Float[Tensor, "N B H L D"] | None
    values: Float[Tensor, "N B H L Dv"] | None
    queries: Queries | None  # the same for every layer

    def layer(self, layer: int) -> LayerView:
        """Return the `score` view of a layer."""
        return LayerView(
            layer=torch.full_like(self.length, layer),
            shape=self.shape,
            position=self.position[layer],
            fresh=self.fresh[layer],
            score=self.score[layer],
            length=self.length,
            mass=None if self.mass is None else self.mass[layer],
            seen=None if self.seen is None else self.seen[layer],
            also={name: sums[layer] for name, sums in self.also.items()},
            replayed=None if self.replayed is None else self.replayed[layer],
            generated=self.generated,
            keys=None if self.keys is None else self.keys[layer],
            values=None if self.values is None else self.values[layer],
            queries=self.queries,
            rope=None if self.queries is None else self.shape.rope_of(layer),
        )

    def stacked(self) -> LayerView:
        """Return the `score` view of all layers at once, layer after layer along the batch."""
        layers = self.shape.layers

        def rows(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.flatten(0, 1)

        return LayerView(
            layer=torch.arange(layers).repeat_interleave(len(self.length)),
            shape=self.shape,
            position=self.position.flatten(0, 1),
            fresh=self.fresh.flatten(0, 1),
            score=self.score.flatten(0, 1),
            length=self.length.repeat(layers),
            mass=rows(self.mass),
            seen=rows(self.seen),
            also={name: sums.flatten(0, 1) for name, sums in self.also.items()},
            replayed=rows(self.replayed),
            generated=self.generated,
            keys=rows(self.keys),
            values=rows(self.values),
        )

    def held(self, layer: int, score: Float[Tensor, "N B H L"]) -> LayerView:
        """Return the `rescore` view of a layer; the score of empty slots is NaN."""
        empty = self.position[layer] < 0

        def stored(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[layer].masked_fill(empty[..., None], 0)

        return LayerView(
            layer=torch.full_like(self.length, layer),
            shape=self.shape,
            position=self.position[layer],
            fresh=self.fresh[layer],
            score=score[layer].masked_fill(empty, torch.nan),
            length=self.length,
            keys=stored(self.keys),
            values=stored(self.values),
        )

    def plan(
        self,
        score: Float[Tensor, "N B H L"],
        head_stats: Float[Tensor, "N B H"] | None,
        layers: slice,
        stored_score: Float[Tensor, "N B H L"] | None = None,
    ) -> PlanView:
        """Return the `plan` view of some layers; the score of empty slots is NaN."""
        position = self.position[layers]
        empty = position < 0
        return PlanView(
            shape=self.shape,
            first_layer=layers.start,
            score=score[layers].masked_fill(empty, torch.nan),
            position=position,
            tier=self.tier[layers],
            length=self.length,
            budget=self.budget,
            head_stats=None if head_stats is None else head_stats[layers],
            stored_score=(
                None if stored_score is None else stored_score[layers].masked_fill(empty, torch.nan)
            ),
            page=self.page,
        )

    def merge(
        self,
        layer: int,
        score: Float[Tensor, "N B H L"],
        kept: Bool[Tensor, "N B H L"],
        seed: int,
    ) -> MergeView:
        """Return the `merge` view of a layer, with drawn vectors if the method reads none.

        The score of empty slots is NaN. Drawn vectors depend on head and position alone.
        """
        position = self.position[layer]
        empty = position < 0

        def vectors(x: Tensor | None, dim: int, salt: int) -> Float[Tensor, "B H L D"]:
            if x is not None:
                return x[layer].masked_fill(empty[..., None], 0)
            generator = torch.Generator().manual_seed(1000 * seed + salt)
            heads = self.shape.first_head + self.shape.kv_heads
            table = torch.randn(heads, 4096, dim, generator=generator)
            head = torch.arange(self.shape.first_head, heads)[:, None]
            return table[head, position.clamp(min=0) % 4096].masked_fill(empty[..., None], 0)

        return MergeView(
            layer=torch.full_like(self.length, layer),
            shape=self.shape,
            position=position,
            kept=kept[layer],
            score=score[layer].masked_fill(empty, torch.nan),
            length=self.length,
            threshold=0.2 * position[..., 0].clamp(0, 1).float(),
            keys=vectors(self.keys, self.shape.key_dim, 0),
            values=vectors(self.values, self.shape.value_dim, 1),
        )

    def newest(self) -> "DrawnTokens":
        """Keep only the last token of each head."""
        at = (self.position >= 0).sum(-1, keepdim=True) - 1

        def pick(x: Tensor) -> Tensor:
            index = at.reshape(*at.shape, *(1,) * (x.ndim - 4))
            return x.gather(3, index.expand(*at.shape, *x.shape[4:]))

        return self._with(pick, self.shape, self.length, self.budget, self.queries)

    def without(
        self, gone: Bool[Tensor, "N B H L"]
    ) -> tuple["DrawnTokens", Callable[[Tensor], Tensor]]:
        """Remove tokens, and return a function that removes them from a result, too."""
        position = self.position.masked_fill(gone, -1)
        last = torch.iinfo(position.dtype).max
        order = position.masked_fill(position < 0, last).argsort(dim=-1, stable=True)

        def pick(x: Tensor) -> Tensor:
            index = order.reshape(*order.shape, *(1,) * (x.ndim - 4))
            return x.gather(3, index.expand(*order.shape, *x.shape[4:]))

        left = dataclasses.replace(self, position=position)
        return left._with(pick, self.shape, self.length, self.budget, self.queries), pick

    def cut(
        self, sequences: Int[Tensor, " S"], heads: slice
    ) -> tuple["DrawnTokens", Callable[[Tensor], Tensor]]:
        """Return some sequences and heads without padding, and a function that cuts a result."""
        kept = self.position[:, sequences][:, :, heads] >= 0
        places = max(1, int(kept.sum(-1).max()))

        def pick(x: Tensor) -> Tensor:
            return x[:, sequences][:, :, heads, :places]

        shape, asked = shard(self.shape, heads), self.queries
        if asked is not None:
            asked = Queries(asked.vectors[sequences][:, heads], asked.position[sequences])
        cut = self.length[sequences], self.budget[sequences]
        return self._with(pick, shape, *cut, asked), pick

    def _with(
        self,
        pick: Callable[[Tensor], Tensor],
        shape: CacheShape,
        length: Int[Tensor, " B"],
        budget: Int[Tensor, " B"],
        queries: Queries | None,
    ) -> "DrawnTokens":
        picked: dict[str, Any] = {
            field.name: pick(value)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor) and value.ndim >= 4
        }
        picked["also"] = {name: pick(sums) for name, sums in self.also.items()}
        picked |= {"shape": shape, "length": length, "budget": budget, "queries": queries}
        return dataclasses.replace(self, **picked)


def shard(shape: CacheShape, heads: slice) -> CacheShape:
    """Return the shape of a range of the heads."""
    kept = range(shape.kv_heads)[heads]
    return dataclasses.replace(shape, kv_heads=len(kept), first_head=shape.first_head + kept.start)


def after_prompt(
    selector: CompleteSelector, shape: CacheShape, stored: float, seed: int
) -> DrawnTokens:
    """Make the tokens that a selector sees after a prefill pass.

    `stored` is the share of each sequence before this pass; some of those tokens were evicted,
    different ones in every head. One sequence has a single token and one has none.
    """
    length = torch.tensor([selector.protected + 40, selector.protected + 17, 1, 0])
    return _tokens(selector, selector.observe, shape, length, (length * stored).long(), seed)


def after_last_queries(selector: CompleteSelector, shape: CacheShape, seed: int) -> DrawnTokens:
    """Make the tokens after a pass with as many queries of a prompt as the selector observes.

    Two sequences have no other new token than those of these queries, and one has more.
    """
    last = selector.observe.last or 0
    length = last + selector.protected + torch.tensor([40, 17, 29, 0])
    before = length - last - torch.tensor([0, 0, 3, 0])
    before[3] = 0  # a sequence without stored tokens
    return _tokens(selector, selector.observe, shape, length, before, seed)


def while_decoding(selector: CompleteSelector, shape: CacheShape, seed: int) -> DrawnTokens:
    """Make the tokens that a selector sees when one token arrives in each sequence."""
    length = torch.tensor([selector.protected + 40, selector.protected + 17, 2, 1])
    if selector.observe.generated:
        watch = dataclasses.replace(selector.observe, last=None)
        return _tokens(selector, watch, shape, length, length - 1, seed, generated=True)
    tokens = _tokens(selector, Observe(), shape, length, length - 1, seed, generated=True)
    return tokens.newest()


def _tokens(
    selector: CompleteSelector,
    watch: Observe,
    shape: CacheShape,
    length: Int[Tensor, " B"],
    before: Int[Tensor, " B"],
    seed: int,
    generated: bool = False,
) -> DrawnTokens:
    generator = torch.Generator().manual_seed(seed)
    lead = (shape.layers, len(length), shape.kv_heads)
    grid = torch.arange(int(length.max())).expand(*lead, -1)
    gone = (torch.rand(grid.shape, generator=generator) < 0.4) & (grid < before[:, None, None])
    held = (grid < length[:, None, None]) & ~gone
    past = int(length.max())
    position = grid.masked_fill(~held, past).sort(-1).values
    position = position.masked_fill(position == past, -1)
    there = position >= 0
    fresh = there & (position >= before[:, None, None])
    tier = torch.randint(selector.tiers, position.shape, generator=generator).to(torch.uint8)
    score = torch.randn(position.shape, generator=generator).masked_fill(~there | fresh, 0)
    mass, seen = _observed(watch, shape, position, length, before, generator)
    replayed = None
    if selector.replay is not None and not generated:
        replayed = torch.rand(position.shape, generator=generator).masked_fill(~fresh, 0)

    def vectors(dim: int) -> Float[Tensor, "N B H L D"]:
        x = torch.randn(*position.shape, dim, generator=generator)
        return x.masked_fill(~there[..., None], 0)

    least, whole = max(1, selector.protected), selector.budget is None
    return DrawnTokens(
        shape=shape,
        length=length,
        budget=length if whole else torch.tensor([least, least + 7, least, least + 1000]),
        page=torch.arange(selector.tiers) + 4,
        position=position,
        fresh=fresh,
        tier=tier.masked_fill(fresh, FRESH).masked_fill(~there, DROP),
        score=score,
        mass=mass,
        seen=seen,
        also={} if mass is None else {name: mass * 0.3 for name in watch.also},
        replayed=replayed,
        generated=generated,
        keys=vectors(shape.key_dim) if "keys" in selector.reads else None,
        values=vectors(shape.value_dim) if "values" in selector.reads else None,
        queries=_queries(shape, length, before, generator) if "queries" in selector.reads else None,
    )


def _queries(
    shape: CacheShape,
    length: Int[Tensor, " B"],
    before: Int[Tensor, " B"],
    generator: torch.Generator,
) -> Queries:
    grid = torch.arange(int((length - before).max())) + before[:, None]
    lead = (len(length), shape.kv_heads, shape.group, grid.shape[1], shape.key_dim)
    vectors = torch.randn(lead, generator=generator)
    return Queries(vectors, grid.masked_fill(grid >= length[:, None], -1))


def _observed(
    watch: Observe,
    shape: CacheShape,
    position: Int[Tensor, "N B H L"],
    length: Int[Tensor, " B"],
    before: Int[Tensor, " B"],
    generator: torch.Generator,
) -> tuple[Float[Tensor, "N B H L"] | None, Int[Tensor, "N B H L"] | None]:
    if watch.last == 0 and not watch.generated:
        return None, None
    first = before if watch.last is None else torch.maximum(before, length - watch.last)
    from_here = torch.maximum(first[:, None, None], position + watch.skip)
    seen = (length[:, None, None] - from_here).clamp(min=0).masked_fill(position < 0, 0)
    most = shape.group if watch.group == "sum" else 1
    return torch.rand(position.shape, generator=generator) * seen * most, seen


def decoding_step(selector: CompleteSelector, shape: CacheShape, seed: int) -> StepView:
    """Make a decode step of three sequences, with heads empty, below, at and above budget."""
    generator = torch.Generator().manual_seed(seed)
    budget = max(1, selector.protected) + torch.tensor([0, 5, 60])
    lead = (shape.layers, 3, shape.kv_heads)
    extra = torch.randint(-2, 2, lead, generator=generator)
    extra[:, 2, -1] = 100 if selector.scope == "model" else 1
    total = (budget[:, None] + extra).clamp(min=0)
    total[:, 1, 0] = 0
    share = torch.rand(selector.tiers, *lead, generator=generator)
    count = (share / share.sum(0) * total).long()
    count[0] += total - count.sum(0)
    weakest = torch.randn(count.shape, generator=generator).masked_fill(count == 0, torch.inf)
    return StepView(
        shape=shape,
        first_layer=0,
        candidate=torch.randn(lead, generator=generator),
        weakest=weakest,
        count=count,
        tier_thresholds=torch.rand(count.shape, generator=generator)
        .sort(0, descending=True)
        .values,
        length=total.amax((0, 2)) + 5,
        budget=budget,
    )


def layers_of(view: StepView, layers: slice) -> StepView:
    """Return the step of some layers."""
    return dataclasses.replace(
        view,
        first_layer=view.first_layer + layers.start,
        candidate=view.candidate[layers],
        weakest=view.weakest[:, layers],
        count=view.count[:, layers],
        tier_thresholds=view.tier_thresholds[:, layers],
    )


def cut_step(view: StepView, sequences: Int[Tensor, " S"], heads: slice) -> StepView:
    """Return the step of some sequences and heads."""

    def pick(x: Tensor) -> Tensor:
        return x[..., sequences, :][..., heads]

    return dataclasses.replace(
        view,
        shape=shard(view.shape, heads),
        candidate=pick(view.candidate),
        weakest=pick(view.weakest),
        count=pick(view.count),
        tier_thresholds=pick(view.tier_thresholds),
        length=view.length[sequences],
        budget=view.budget[sequences],
    )
