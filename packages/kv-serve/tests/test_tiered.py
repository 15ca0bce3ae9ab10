"""The cache under selectors, against attention over the very tokens it says it keeps."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import pytest
import torch
from jaxtyping import Float, UInt8
from msgspec import Meta
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kv_paging import PoolExhausted
from kv_policy import (
    DROP,
    NOBODY,
    Budget,
    CacheShape,
    Evictor,
    Formats,
    LayerView,
    Observe,
    Part,
    PlanView,
    RawCodec,
    Replan,
    Rope,
    Step,
    StepView,
    TokenFormat,
    best,
    compose,
    parse,
    protect,
)
from kv_serve.tiered import TieredCache

SHAPE = CacheShape(layers=3, kv_heads=2, group=2, key_dim=6, value_dim=5, dtype=torch.float32)


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


class World:
    """A batch of random streams, of which everything is remembered, beside the cache."""

    def __init__(self, policy, sequences: int = 2, **options: object) -> None:
        self.cache = TieredCache(policy, SHAPE, page_tokens=4, **options)
        self.sequences = sequences
        lead = (SHAPE.layers, sequences, SHAPE.kv_heads, 400)
        self.key, self.value = torch.randn(*lead, 6), torch.randn(*lead, 5)
        self.seen = torch.zeros(sequences, dtype=torch.long)

    def kept(self, layer: int) -> Tensor:
        """[B, H, 400] bool: the positions the layer holds, each once."""
        batch = self.cache.batch
        count = torch.zeros(self.sequences, SHAPE.kv_heads, 401, dtype=torch.long)
        if batch is None:
            return count[..., :400] > 0
        for store in batch.stores:
            read = store.read(batch.streams(layer))
            place = read.position.long().masked_fill(~read.held, 400)
            count.scatter_add_(
                -1,
                place.view(self.sequences, 2, -1),
                torch.ones_like(place.view(self.sequences, 2, -1)),
            )
        if batch.window is not None:
            place = batch.window.position.masked_fill(batch.window.position < 0, 400)
            place = place[:, None].expand(-1, 2, -1)
            count.scatter_add_(-1, place, torch.ones_like(place))
        assert count[..., :400].max() <= 1
        return count[..., :400] > 0

    def forward(self, valid: Tensor) -> None:
        """One pass over new columns, checked layer by layer."""
        self.cache.begin(valid)
        width = valid.shape[1]
        place = (self.seen[:, None] + valid.long().cumsum(-1) - 1).masked_fill(~valid, 399)
        total = self.seen + valid.sum(-1)
        for layer in range(SHAPE.layers):
            before = self.kept(layer)
            index = place[:, None, :, None].expand(-1, 2, -1, 6)
            key = self.key[layer].gather(2, index)
            value = self.value[layer].gather(2, index[..., :5])
            query = torch.randn(self.sequences, 2, 2, width, 6)
            out = self.cache.attend(layer, query, key, value, 0.4)
            fresh = torch.arange(400)[None] >= self.seen[:, None]
            fresh &= torch.arange(400)[None] < total[:, None]
            visible = before[:, :, None] | fresh[:, None, None]
            causal = torch.arange(400)[None, None] <= place[..., None]
            mask = (visible & causal[:, None])[:, :, None]  # B H 1 L 400
            logits = (query @ self.key[layer][:, :, None].mT) * 0.4
            want = logits.masked_fill(~mask, -torch.inf).softmax(-1) @ self.value[layer][:, :, None]
            real = valid[:, None, None, :].expand(out.shape[:-1])
            torch.testing.assert_close(out[real], want[real], rtol=1e-4, atol=1e-5)
        self.seen = total
        pool = self.cache.batch.pool
        pool.check(torch.cat([s.pages() for s in self.cache.batch.stores]))


def ragged(*lengths: int) -> Tensor:
    width = max(lengths)
    return torch.arange(width)[None] >= width - torch.tensor(lengths)[:, None]


def one(sequences: int = 2) -> Tensor:
    return torch.ones(sequences, 1, dtype=torch.bool)


POLICIES = {
    "streaming": parse("streaming:budget=12,sinks=2"),
    "streaming-window": compose(parse("streaming:budget=12,sinks=2"), Exact(1, 5)),
    "snapkv": parse("snapkv:budget=14,window=4,pool=3"),
    "snapkv-window": compose(parse("snapkv:budget=14,window=4,pool=3"), Exact(1, 6)),
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
    "leankv-token": parse("leankv:high=raw,low=raw,form=token,window=4,alpha_low=0.5"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_attention_is_over_the_tokens_that_are_kept(name: str) -> None:
    world = World(POLICIES[name])
    world.forward(ragged(31, 18))
    for _ in range(9):
        world.forward(one())
    world.forward(ragged(3, 11))
    for _ in range(9):
        world.forward(one())
    world.cache.select(torch.tensor([1, 1, 0]))
    world.sequences = 3
    chosen = torch.tensor([1, 1, 0])
    world.key, world.value = world.key[:, chosen], world.value[:, chosen]
    world.seen = world.seen[chosen]
    for _ in range(6):
        world.forward(one(3))


@pytest.mark.parametrize("window", [0, 5])
def test_blocks_without_a_selector_give_what_single_tokens_give(window: int) -> None:
    torch.manual_seed(3)
    lead = (SHAPE.layers, 2, 2, 60)
    query, key, value = (torch.randn(*lead, d) for d in (6, 6, 5))
    caches = [TieredCache(Exact(1, window, block), SHAPE, page_tokens=4) for block in (1, 4)]
    start = 0
    for width in (21, 1, 1, 1, 1, 1, 3, 1):
        at = slice(start, start + width)
        for cache in caches:
            cache.begin(torch.ones(2, width, dtype=torch.bool))
        for layer in range(SHAPE.layers):
            one, other = (
                cache.attend(
                    layer,
                    query[layer, :, :, None, at],
                    key[layer, :, :, at],
                    value[layer, :, :, at],
                    1.0,
                )
                for cache in caches
            )
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        start += width
    alone, together = (cache.batch for cache in caches)
    assert together.tiers.in_blocks
    assert torch.equal(alone.tiers.counts(), together.tiers.counts())
    together.tiers.check()


class NoWait(TorchDispatchMode):
    """Refuses operations for which the host waits for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        if name in {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select"}:
            raise AssertionError(f"{name} makes the host wait")
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self._reads = pytest.MonkeyPatch()
        for name in ("tolist", "numpy", "cpu"):  # on a CPU these never come to the dispatcher
            self._reads.setattr(Tensor, name, self._refuse)
        return super().__enter__()

    def __exit__(self, *raised):
        self._reads.undo()
        return super().__exit__(*raised)

    @staticmethod
    def _refuse(*_):
        raise AssertionError("reading a tensor makes the host wait")


@pytest.mark.parametrize("name", ["leankv", "leankv-drop", "leankv-token", "keep-all"])
def test_a_decode_step_does_not_wait_for_the_device(name: str) -> None:
    policy = Exact(1, 3) if name == "keep-all" else POLICIES[name]
    cache = TieredCache(policy, SHAPE, page_tokens=4)

    def forward(width: int) -> None:
        cache.begin(torch.ones(2, width, dtype=torch.bool))
        for layer in range(SHAPE.layers):
            query, key, value = (torch.randn(2, 2, width, d) for d in (6, 6, 5))
            cache.attend(layer, query[:, :, None], key, value, 0.4)

    forward(30)
    forward(1)  # the pool grows, and promises pages for the next steps
    cache.batch.pool.reserve(200)
    forward(1)
    with NoWait():
        forward(1)
    with NoWait(), pytest.raises(AssertionError, match="makes the host wait"):
        cache.memory()


@pytest.mark.parametrize("window", [0, 5])
def test_streaming_holds_its_sinks_and_the_newest(window: int) -> None:
    policy = parse("streaming:budget=12,sinks=2")
    world = World(compose(policy, Exact(1, window)) if window else policy)
    world.forward(ragged(31, 7))
    for step in range(20):
        world.forward(one())
        for layer in range(SHAPE.layers):
            kept = world.kept(layer)
            for b in range(2):
                n = int(world.seen[b])
                want = set(range(min(n, 2))) | set(range(max(0, n - 10 - window), n))
                got = set(kept[b, 0].nonzero().flatten().tolist())
                assert got == want, (step, b)
                assert torch.equal(kept[b, 0], kept[b, 1])


def test_the_best_are_kept_and_the_budget_is_met_per_sequence() -> None:
    world = World(ByKey(Budget(10)), budgets=[None, Budget(4)])
    world.forward(ragged(31, 25))
    for layer in range(SHAPE.layers):
        for b, budget in enumerate((10, 4)):
            score = world.key[layer, b, :, : int(world.seen[b]), 0].clone()
            score[:, 0] = torch.inf
            want = best(score, torch.full((2,), budget))
            assert torch.equal(world.kept(layer)[b, :, : score.shape[1]], want)


def test_a_budget_over_all_layers_is_spent_where_scores_are_high() -> None:
    world = World(ByKey(Budget(10), whole=True))
    world.key[1, ..., 0] += 10
    world.forward(ragged(31, 25))
    tokens = world.cache.memory().tokens
    assert (tokens.sum((0, 2)) == 10 * 3 * 2).all()
    assert (tokens[1] > tokens[0]).all()


def test_a_share_of_the_prompt_and_bytes_per_token() -> None:
    world = World(ByKey(Budget(50, "percent")))
    world.forward(ragged(32, 20))
    assert world.cache.memory().tokens[0, :, 0].tolist() == [16, 10]
    record = 3 * 2 * (4 * 11 + 8)
    world = World(ByKey(Budget(record / 4, "bytes")))
    world.forward(ragged(32, 20))
    assert world.cache.memory().tokens[0, :, 0].tolist() == [8, 5]


def test_a_ladder_keeps_its_tiers_full_and_bounded() -> None:
    world = World(compose(Ladder(high=4, low=6), Exact(2)))
    world.forward(ragged(31, 28))
    for _ in range(15):
        world.forward(one())
        high, low = (s.length for s in world.cache.batch.stores)
        assert int(high.min()) >= 4
        assert int(high.max()) <= 5
        assert int(low.max()) <= 6 + 15


def test_pages_are_reused_and_none_is_lost() -> None:
    world = World(parse("streaming:budget=12,sinks=2"), pages=40)
    world.forward(ragged(16, 16))
    used = world.cache.memory().pages_used
    for _ in range(100):
        world.forward(one())
    assert world.cache.memory().pages_used <= used
    assert world.cache.memory().pages_used == 3 * 2 * 2 * 3


@pytest.mark.parametrize("policy", ["h2o:budget=10", "scissorhands:budget=10,window=9,recent=5"])
def test_the_newest_tokens_are_no_victims_and_the_budget_is_held(policy: str) -> None:
    world = World(parse(policy))
    world.forward(ragged(30, 7))
    for _ in range(20):
        world.forward(one())
        for layer in range(SHAPE.layers):
            held = world.kept(layer)
            assert int(held.sum(-1).max()) <= 10
            for b, seen in enumerate(world.seen.tolist()):
                assert bool(held[b, :, max(0, seen - 5) : seen].all())


def filled(policy: str, sequences: list[int], rows: slice, steps: int = 0) -> TieredCache:
    """A cache that read prompts of these lengths and some steps; only `rows` are in the batch."""
    generator = torch.Generator().manual_seed(5)
    width = max(sequences)
    lead = (SHAPE.layers, len(sequences), SHAPE.kv_heads)
    query = torch.randn(*lead, 2, width, 6, generator=generator)[:, rows]
    key = torch.randn(*lead, width, 6, generator=generator)[:, rows]
    value = torch.randn(*lead, width, 5, generator=generator)[:, rows]
    cache = TieredCache(parse(policy), SHAPE, page_tokens=4)
    cache.begin(ragged(*sequences)[rows])
    for layer in range(SHAPE.layers):
        cache.attend(layer, query[layer], key[layer], value[layer], 0.4)
    for _ in range(steps):
        query = torch.randn(*lead, 2, 1, 6, generator=generator)[:, rows]
        key = torch.randn(*lead, 1, 6, generator=generator)[:, rows]
        value = torch.randn(*lead, 1, 5, generator=generator)[:, rows]
        cache.begin(one(len(ragged(*sequences)[rows])))
        for layer in range(SHAPE.layers):
            cache.attend(layer, query[layer], key[layer], value[layer], 0.4)
    return cache


def places(cache: TieredCache, sequence: int) -> list[list[list[int]]]:
    """The positions that each head of each layer holds of a sequence, tier by tier."""
    found = []
    for store in cache.batch.stores:
        read = store.read(store.streams())
        place = read.position.masked_fill(~read.held, -1)
        rows = place.unflatten(0, (SHAPE.layers, -1, SHAPE.kv_heads))[:, sequence].flatten(0, 1)
        found.append([sorted(p for p in row.tolist() if p >= 0) for row in rows])
    return found


@pytest.mark.parametrize(
    "policy",
    [
        "kv-compress:budget=12,window=4,recent=4,every=4",
        "kv-compress:rate=3,floor=8,window=full,skip=2",
        "kv-compress:budget=12,window=4,recent=4+leankv:high=raw,low=raw,window=3,t_high=0.4",
        "h2o:budget=9",
        "cake:budget=12,window=4",
    ],
)
def test_sequences_compressed_together_keep_what_they_keep_alone(policy: str) -> None:
    lengths = [37, 9, 52]
    together = filled(policy, lengths, slice(None), steps=9)
    for b in range(3):
        alone = filled(policy, lengths, slice(b, b + 1), steps=9)
        assert places(together, b) == places(alone, 0)


def test_a_plan_takes_as_many_tokens_as_it_may_and_the_rest_waits() -> None:
    budget, heads = 12, SHAPE.layers * SHAPE.kv_heads
    policy = f"kv-compress:budget={budget},window=4,recent=4,most={60 * heads}"
    world = World(parse(policy), sequences=3)
    world.forward(ragged(40, 30, 35))

    def held() -> list[int]:
        return world.cache.memory().tokens.sum((0, 2)).tolist()

    assert held()[1:] == [30 * heads, 35 * heads]  # 40 + 30 is too much
    assert held()[0] <= budget * heads
    world.forward(one(3))
    assert held()[1] <= budget * heads
    assert held()[2] == 36 * heads
    world.forward(one(3))
    assert held()[2] <= budget * heads
    memory = world.cache.memory()
    assert memory.pages_free <= memory.pages_used  # what they left is memory given back
    before = held()
    world.forward(one(3))
    assert held() == [n + heads for n in before]  # nobody waits any more


def generate(world: World, steps: int) -> None:
    """Let every sequence go on."""
    for _ in range(steps):
        world.forward(one(world.sequences))


def test_a_pool_that_runs_dry_is_compressed_or_exhausted() -> None:
    text, pages = "kv-compress:budget=12,window=4,recent=4", 56
    dry = World(parse(text), pages=pages)
    dry.forward(ragged(20, 20))
    with pytest.raises(PoolExhausted):
        generate(dry, 40)
    short = World(parse(f"{text},short=true"), pages=pages)
    short.forward(ragged(20, 20))
    generate(short, 40)
    assert short.cache.batch.pool.capacity == pages


def test_a_pool_too_small_for_the_budget_is_exhausted_all_the_same() -> None:
    world = World(parse("kv-compress:budget=12,window=4,recent=4,short=true"), pages=40)
    world.forward(ragged(20, 20))
    with pytest.raises(PoolExhausted):
        generate(world, 40)


def test_pages_held_are_those_that_the_kept_tokens_need() -> None:
    for window in ("4", "full"):
        cache = filled(
            f"kv-compress:budget=16,window={window},skip=2,recent=4", [160, 160], slice(None)
        )
        tokens = int(cache.memory().tokens.sum())
        assert cache.batch.pool.used == -(-tokens // 4)
        assert tokens == 16 * 2 * SHAPE.layers * SHAPE.kv_heads


def test_queries_are_given_to_whoever_reads_them_and_refused_without_a_rope() -> None:
    with pytest.raises(ValueError, match="needs the model's rotary embedding"):
        TieredCache(parse("expected-attention:budget=12"), SHAPE)
    shape = replace(SHAPE, rope=Rope((1.0, 0.1, 0.01)))
    cache = TieredCache(parse("expected-attention:budget=12"), shape, page_tokens=4)
    for width in (40, 1):
        cache.begin(torch.ones(1, width, dtype=torch.bool))
        for layer in range(SHAPE.layers):
            cache.attend(
                layer,
                torch.randn(1, 2, 2, width, 6),
                torch.randn(1, 2, width, 6),
                torch.randn(1, 2, width, 5),
                0.4,
            )
    assert cache.memory().tokens.unique().tolist() == [13]
