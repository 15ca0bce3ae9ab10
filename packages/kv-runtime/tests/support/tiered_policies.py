"""The policies with which the cache under selectors is tested, some of them made for that."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Final, Literal

import torch
from jaxtyping import Float, UInt8
from msgspec import Meta
from torch import Tensor

from kv_policy import (
    DROP,
    NOBODY,
    Basis,
    Budget,
    CacheShape,
    Evictor,
    Formats,
    HeadBasis,
    KVPolicy,
    LayerBasis,
    LayerView,
    Observe,
    Part,
    PlanView,
    RawCodec,
    Replan,
    Step,
    StepView,
    TokenFormat,
    best,
    compose,
    parse,
    protect,
)

SHAPE: Final[CacheShape] = CacheShape(
    layers=3, kv_heads=2, group=2, key_dim=6, value_dim=5, dtype=torch.float32
)


@dataclass(frozen=True)
class Together:
    """Stores blocks of vectors exactly."""

    dim: int
    block: int
    layout: None = None

    @property
    def parts(self) -> tuple[int]:
        return (4 * self.block * self.dim,)

    def encode(self, x: Tensor) -> Tensor:
        return x.float().contiguous().flatten(1).view(torch.uint8)

    def decode(self, data: Tensor) -> Tensor:
        return data.contiguous().view(torch.float32).view(-1, self.block, self.dim)

    def bound(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


@dataclass(frozen=True)
class Exact(Part):
    """Several tiers that all store exactly, so that only the plumbing is tested."""

    name: ClassVar[str] = "exact"
    tiers: Annotated[int, Meta(ge=1)] = 1
    window: Annotated[int, Meta(ge=0)] = 0
    block: Annotated[int, Meta(ge=1)] = 1  # of the first tier

    @property
    def formats(self) -> Formats:
        return self

    def bind(self, shape: CacheShape) -> tuple[TokenFormat, ...]:
        key, value = RawCodec(shape.key_dim, shape.dtype), RawCodec(shape.value_dim, shape.dtype)
        alone = TokenFormat(key, value)
        if self.block == 1:
            return (alone,) * self.tiers
        blocks = TokenFormat(Together(key.dim, self.block), Together(value.dim, self.block))
        return (blocks, *((alone,) * (self.tiers - 1)))


@dataclass(frozen=True)
class ByKey(Evictor):
    """Keeps the keys of greatest first coordinate, and replans while decoding."""

    name: ClassVar[str] = "bykey"
    every: int = 0
    whole: bool = False
    sinks: int = 1

    @property
    def reads(self) -> frozenset[Literal["keys", "values"]]:
        return frozenset({"keys"})

    @property
    def scope(self) -> Literal["layer", "model"]:
        return "model" if self.whole else "layer"

    @property
    def replan(self) -> Replan:
        return Replan(every=self.every)

    @property
    def protected(self) -> int:
        return self.sinks

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        assert view.keys is not None
        return protect(view.keys[..., 0].float(), view, self.sinks)

    def plan(self, view: PlanView) -> UInt8[Tensor, "N B H L"]:
        if not self.whole:
            return super().plan(view)
        N, B, H, L = view.score.shape
        held = view.position >= 0
        pooled = view.score.masked_fill(~held, -torch.inf).permute(1, 0, 2, 3).reshape(B, -1)
        keep = best(pooled, view.budget * N * H).view(B, N, H, L).permute(1, 0, 2, 3) & held
        return torch.where(keep, 0, DROP).to(torch.uint8)


@dataclass(frozen=True)
class Ladder(Evictor):
    """Two tiers and a way out: a token arrives in the first and is handed down step by step."""

    name: ClassVar[str] = "ladder"
    high: int = 4
    low: int = 6

    @property
    def tiers(self) -> int:
        return 2

    @property
    def decode(self) -> Literal["grow", "step"]:
        return "step"

    @property
    def observe(self) -> Observe:
        return Observe(last=None, group="max", generated=True, skip=1)

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        assert view.mass is not None
        return torch.where(view.position >= 0, view.score + view.mass, 0)

    def plan(self, view: PlanView) -> UInt8[Tensor, "N B H L"]:
        score = view.score.masked_fill(view.position < 0, -torch.inf)
        rank = score.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        tier = torch.where(rank < self.high, 0, torch.where(rank < self.high + self.low, 1, DROP))
        tier = torch.where((view.tier == 1) & (tier == 0), 1, tier)
        return tier.to(torch.uint8)

    def step(self, view: StepView) -> Step:
        high, low = view.count
        first = torch.zeros_like(high, dtype=torch.uint8)
        spill = high >= self.high
        leave = ~spill & (low >= self.low)
        victim = torch.where(spill, 0, torch.where(leave, 1, NOBODY)).to(torch.uint8)
        target = torch.where(spill, 1, DROP).to(torch.uint8)
        return Step(first, victim, target)


@dataclass(frozen=True)
class Turned(Part):
    """Bases at random: orthonormal, or pairs that are not, with ranks from a list."""

    name: ClassVar[str] = "turned"
    key_ranks: str = "6"  # taken in turn by layers and heads
    value_ranks: str = "5"
    together: Annotated[int, Meta(ge=1)] = 1
    paired: bool = False
    shifted: bool = False  # keys; exact only if nothing is dropped

    @property
    def basis(self) -> Basis:
        return self

    def bind(self, layer: int, shape: CacheShape) -> LayerBasis:
        key = self._maps(layer, shape, shape.key_dim, self.key_ranks, 0)
        if self.shifted:
            g = torch.Generator().manual_seed(layer)
            shift = 3 * torch.randn(shape.kv_heads, shape.key_dim, generator=g)
            key = replace(key, shift=shift)
        return LayerBasis(
            key,
            self._maps(layer, shape, shape.value_dim, self.value_ranks, 1),
        )

    def _maps(self, layer: int, shape: CacheShape, dim: int, text: str, seed: int) -> HeadBasis:
        g = torch.Generator().manual_seed(2 * layer + seed)
        heads, each = shape.kv_heads // self.together, [int(x) for x in text]
        rank = tuple(each[(layer * heads + h) % len(each)] for h in range(heads))
        size = dim * self.together
        whole = torch.linalg.qr(torch.randn(heads, size, size, generator=g).double()).Q
        other = whole
        if self.paired:
            stretch = torch.rand(heads, 1, size, generator=g).double() + 0.5
            whole, other = whole * stretch, whole / stretch
        kept = torch.arange(size) < torch.tensor(rank)[:, None, None]
        first, second = (
            (x * kept)[..., : max(rank)].float().unflatten(1, (self.together, dim)).flatten(0, 1)
            for x in (whole, other)
        )
        return HeadBasis(first, rank, second if self.paired else None, self.together)


@dataclass(frozen=True)
class Swapped(Turned):
    """Coordinates in another order, each times a power of two: no product is rounded."""

    def _maps(self, layer: int, shape: CacheShape, dim: int, text: str, seed: int) -> HeadBasis:
        g = torch.Generator().manual_seed(2 * layer + seed)
        heads, rank = shape.kv_heads, int(text)
        order = torch.stack([torch.randperm(dim, generator=g) for _ in range(heads)])
        sign = 1 - 2 * torch.randint(2, (heads, 1, dim), generator=g)
        scale = 2.0 ** torch.randint(-2, 3, (heads, 1, dim), generator=g)
        whole = torch.eye(dim)[order].mT * sign
        first, second = ((whole * x)[..., :rank] for x in (scale, 1 / scale))
        return HeadBasis(first, (rank,) * heads, second)


@dataclass(frozen=True)
class Cut(Turned):
    """A basis of keys beside values that are only truncated, as in a folded checkpoint."""

    def bind(self, layer: int, shape: CacheShape) -> LayerBasis:
        found = super().bind(layer, shape)
        assert found.value is not None
        return LayerBasis(found.key, HeadBasis.truncating(shape.value_dim, found.value.rank))


POLICIES: Final[dict[str, KVPolicy]] = {
    "streaming": parse("streaming:budget=12,sinks=2"),
    "streaming-window": compose(parse("streaming:budget=12,sinks=2"), Exact(1, 5)),
    "snapkv": parse("snapkv:budget=14,window=4,pool=3"),
    "snapkv-window": compose(parse("snapkv:budget=14,window=4,pool=3"), Exact(1, 6)),
    "chunkkv": parse("chunkkv:budget=14,window=4,pool=3,chunk=3"),
    "chunkkv-leankv-drop": parse(
        "chunkkv:budget=12,window=4,chunk=3+leankv:high=raw,low=raw,t_high=0.5,t_low=0.2"
    ),
    "bykey": ByKey(Budget(10)),
    "bykey-replan": ByKey(Budget(10), every=3),
    "bykey-model": ByKey(Budget(10), whole=True),
    "bykey-model-replan": ByKey(Budget(50, "percent"), every=4, whole=True),
    "bykey-replan-window": compose(ByKey(Budget(10), every=3), Exact(1, 5)),
    "ladder": compose(Ladder(), Exact(2)),
    "ladder-window": compose(Ladder(), Exact(2, 3)),
    "ladder-blocks": compose(Ladder(), Exact(2, 3, block=4)),
    "bykey-blocks": compose(ByKey(Budget(10), every=3), Exact(1, block=2)),
    "leankv": parse("leankv:high=raw,low=raw,t_high=0.3,window=4"),
    "leankv-all-queries-mean": parse("leankv:high=raw,low=raw,t_high=0.3,t_low=0.1,group=mean"),
    "leankv-drop": parse("leankv:high=raw,low=drop,t_high=0.2,window=4,last=8"),
    "kv-compress": parse("kv-compress:budget=12,window=4,pool=3,recent=4"),
    "kv-compress-every": parse("kv-compress:budget=12,window=4,recent=4,every=3"),
    "kv-compress-even": parse("kv-compress:budget=12,window=4,recent=4,every=5,layers=even"),
    "kv-compress-full": parse("kv-compress:budget=12,window=full,skip=2,recent=4,every=4"),
    "kv-compress-turns": parse("kv-compress:budget=12,window=4,recent=4,uncompressed=5,most=99"),
    "kv-compress-window": compose(
        parse("kv-compress:budget=12,window=4,recent=4,every=3"), Exact(1, 5)
    ),
    "kv-compress-leankv": parse(
        "kv-compress:budget=12,window=4,recent=4,every=3+leankv:high=raw,low=raw,window=3"
    ),
    "kv-compress-leankv-drop": parse(
        "kv-compress:budget=12,window=4,recent=4+leankv:high=raw,low=raw,t_high=0.5,t_low=0.2"
    ),
    "h2o": parse("h2o:budget=10"),
    "keyformer": parse("keyformer:budget=10"),
    "scissorhands": parse("scissorhands:budget=10,window=6,recent=3,sinks=1"),
    "tova": parse("tova:budget=10"),
    "fastgen": parse("fastgen:recovery=0.5,sinks=1,window=8"),
    "cake": parse("cake:budget=12,window=4,pool=3"),
    "zigzagkv": parse("zigzagkv:budget=12,window=4,pool=3"),
    "ada-pyramidkv": parse("ada-pyramidkv:budget=12,window=4,pool=3"),
    "keydiff": parse("keydiff:budget=10"),
    "lagkv": parse("lagkv:budget=10,sinks=1,lag=3"),
    "r-kv": parse("r-kv:budget=12,window=4,pool=3,every=3"),
    "r-kv-prompts": parse("r-kv:budget=12,window=4,every=0"),
    "r-kv-window": compose(parse("r-kv:budget=12,window=4,every=3"), Exact(1, 6)),
    "r-kv-leankv": parse("r-kv:budget=12,window=4,every=4+leankv:high=raw,low=raw,window=3"),
    "leankv-token": parse("leankv:high=raw,low=raw,form=token,window=4,alpha_low=0.5"),
}
