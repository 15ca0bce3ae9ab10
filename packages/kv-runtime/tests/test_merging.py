"""Selectors that merge what a plan drops into what it keeps, beside a plain loop over tokens."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import UInt8
from torch import Tensor

from kv_paging import PagePool
from kv_policy import (
    DROP,
    Budget,
    KVPolicy,
    Merge,
    MergeView,
    PlanView,
    compose,
    parse,
)
from kv_runtime.cache import PolicyCache
from tiered_policies import SHAPE, ByKey, Exact, Turned
from tiered_world import World, one, ragged

BUDGET = 9


def shares(position: int, threshold: float) -> tuple[float, float]:
    """The weights of a dropped token in the kept ones after and before it."""
    return 0.5 + 0.1 * threshold, 0.25 if position % 2 else 0.0


def own(position: int) -> float:
    """What is left of a kept token."""
    return 0.5 if position % 5 == 1 else 1.0


@dataclass(frozen=True)
class Folds(ByKey):
    """Merges a dropped token into its kept neighbours; the threshold counts the merges."""

    name: ClassVar[str] = "folds"
    tiers: int = 1
    keys_too: bool = True
    nothing: bool = False  # weights of 0

    def plan(self, view: PlanView) -> UInt8[Tensor, "N B H L"]:
        """Send the better half to the first of two tiers."""
        plan = super().plan(view)
        if self.tiers == 1:
            return plan
        score = view.score.masked_fill(plan == DROP, -torch.inf)
        lower = (score.argsort(-1, descending=True).argsort(-1) >= BUDGET // 2) | (view.tier == 1)
        return torch.where((plan != DROP) & lower, 1, plan).to(torch.uint8)

    def merge(self, view: MergeView) -> Merge:
        """Return the weights, token by token."""
        target = torch.zeros(*view.position.shape, 2, dtype=torch.long)
        weight = torch.zeros(target.shape)
        rest = torch.ones(view.position.shape)
        for b, h, i in (view.position >= 0).nonzero().tolist():
            held = view.kept[b, h].nonzero()[:, 0].tolist()
            position = int(view.position[b, h, i])
            rest[b, h, i] = 1.0 if self.nothing else own(position)
            both = shares(position, float(view.threshold[b, h]))
            sides = [j for j in held if j > i][:1], [j for j in held if j < i][-1:]
            for m, (side, share) in enumerate(zip(sides, both, strict=True)):
                if side and not self.nothing:
                    target[b, h, i, m], weight[b, h, i, m] = side[0], share
        return Merge(target, weight, rest, view.threshold + 1, keys=self.keys_too)


class Folded(World):
    """A world whose kept tokens change by a plain loop over what each pass drops."""

    def __init__(self, policy: KVPolicy, **options: object) -> None:
        super().__init__(policy, **options)
        lead = SHAPE.layers, self.sequences, SHAPE.kv_heads
        self.threshold = torch.zeros(lead)
        self.merges = 0

    def forward(self, valid: Tensor, *, more: bool = False) -> None:
        """One pass, after which the remembered tokens are merged as those in the cache."""
        total = self.seen + valid.sum(-1)
        place = torch.arange(400)
        fresh = (place >= self.seen[:, None]) & (place < total[:, None])
        held = [self.kept(layer) | fresh[:, None] for layer in range(SHAPE.layers)]
        super().forward(valid, more=more)
        for layer, before in enumerate(held):
            after = self.kept(layer)
            for b, h in ((before & ~after).any(-1)).nonzero().tolist():
                self.merge(layer, b, h, before[b, h], after[b, h])

    def merge(self, layer: int, b: int, h: int, before: Tensor, after: Tensor) -> None:
        """Merge the tokens that one head dropped."""
        raw = int(self.seen[b]) - self.cache.layout.window
        kept = [p for p in after.nonzero()[:, 0].tolist() if p < raw]
        gone = [p for p in (before & ~after).nonzero()[:, 0].tolist()]
        self.merges += len(gone)
        selector = self.cache.policy.selector
        changed = (self.key, self.value) if selector.keys_too else (self.value,)
        for x in changed if not selector.nothing else ():
            rows, old = x[layer, b, h], x[layer, b, h].clone()
            for p in kept:
                rows[p] = own(p) * old[p]
            for p in gone:
                both = shares(p, float(self.threshold[layer, b, h]))
                sides = [j for j in kept if j > p][:1], [j for j in kept if j < p][-1:]
                for side, share in zip(sides, both, strict=True):
                    for j in side:
                        rows[j] += share * old[p]
        self.threshold[layer, b, h] += 1

    def expect_vectors(self) -> None:
        """Check the vectors in pages against those that are remembered."""
        if self.basis is not None:
            return  # attention is compared
        batch = self.cache.batch
        for layer in range(SHAPE.layers):
            for store in batch.stores:
                read = store.read(
                    batch.table_rows(slice(layer, layer + 1)), frozenset({"keys", "values"})
                )
                place = read.position.long().clamp(min=0)[..., None]
                for mine, all_of in ((read.key, self.key), (read.value, self.value)):
                    rows = all_of[layer].flatten(0, 1)
                    right = rows.gather(1, place.expand(*place.shape[:2], rows.shape[-1]))
                    torch.testing.assert_close(mine[read.held], right[read.held])


def program(world: Folded) -> None:
    """A prompt in two chunks, generation with plans, and another turn."""
    world.forward(ragged(14, 17), more=True)  # a prompt that is not whole is not planned
    assert not world.merges
    for brings in (ragged(13, 3), *[one()] * 9, ragged(4, 6), *[one()] * 5):
        world.forward(brings)
        world.expect_vectors()
    assert world.merges > 100


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(
    "basis", [None, Turned(), Turned("645", "534"), Turned(paired=True)], ids=str
)
@pytest.mark.parametrize("whole", [False, True])
def test_dropped_tokens_are_merged_as_token_by_token(
    whole: bool, basis: Turned | None, window: int
) -> None:
    policy = Folds(Budget(BUDGET), every=4, whole=whole)
    parts = [policy, Exact(1, window), *([] if basis is None else [basis])]
    program(Folded(compose(*parts)))


@pytest.mark.parametrize("keys_too", [False, True])
def test_tokens_that_move_to_another_tier_are_merged_before(keys_too: bool) -> None:
    policy = Folds(Budget(BUDGET), every=4, tiers=2, keys_too=keys_too)
    program(Folded(compose(policy, Exact(2))))


@given(
    lengths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    steps=st.integers(0, 7),
    every=st.integers(1, 4),
    budget=st.integers(1, 12),
)
@settings(max_examples=10, deadline=None)
def test_any_prompts_and_plans(
    lengths: tuple[int, int], steps: int, every: int, budget: int
) -> None:
    world = Folded(Folds(Budget(budget), every=every))
    world.forward(ragged(*lengths))
    world.go_on(steps)
    world.expect_vectors()


def poisoned(policy: KVPolicy, pages: int = 600) -> PolicyCache:
    """A cache over a pool whose free pages hold what no token may be read from."""
    size = PolicyCache(policy, SHAPE, page_tokens=4).layout.page_bytes
    pool = PagePool.over(torch.full((pages, size), 255, dtype=torch.uint8), poison=True)
    return PolicyCache(policy, SHAPE, page_tokens=4, pool=pool, backend="torch")


def feed(cache: PolicyCache, brings: Tensor, draw: torch.Generator) -> Tensor:
    """A pass of random tokens; return what attention gave, of all layers."""
    cache.begin(brings)
    outs = []
    for layer in range(SHAPE.layers):
        lead = len(brings), 2, brings.shape[1]
        key, value = (torch.randn(*lead, dim, generator=draw) for dim in (6, 5))
        query = torch.randn(len(brings), 2, 2, brings.shape[1], 6, generator=draw)
        before = key.clone(), value.clone()
        outs.append(
            cache.attend(layer, query, key, value, 0.4)[brings[:, None, None].expand(-1, 2, 2, -1)]
        )
        assert torch.equal(key, before[0])  # the model's own vectors stay
        assert torch.equal(value, before[1])
    return torch.stack(outs)


def stored(cache: PolicyCache) -> list[Tensor]:
    """All that is in pages, store by store."""
    batch, found = cache.batch, []
    for store in batch.stores:
        read = store.read(store.table_rows(), frozenset({"keys", "values"}))
        found += [read.position, read.score, read.key, read.value]
    return found


FORMATS = pytest.mark.parametrize("text", ["raw", "bf16", "k8v4", "k4v2:group=2", "k8v4:window=4"])


@FORMATS
def test_weights_of_zero_are_eviction_bit_for_bit(text: str) -> None:
    found = []
    for policy in (ByKey(Budget(BUDGET), every=3), Folds(Budget(BUDGET), every=3, nothing=True)):
        draw, cache = torch.Generator().manual_seed(3), poisoned(compose(policy, parse(text)))
        outs = [feed(cache, ragged(21, 30), draw)] + [feed(cache, one(), draw) for _ in range(7)]
        found.append([*outs, *stored(cache)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@FORMATS
@pytest.mark.parametrize("keys_too", [False, True])
def test_kept_tokens_are_encoded_again_in_their_format(text: str, keys_too: bool) -> None:
    """Vectors are those that a loop merges of what the model brought, but for the codec."""
    cache = poisoned(compose(Folds(Budget(BUDGET), keys_too=keys_too), parse(text)))
    plain = poisoned(compose(ByKey(Budget(400)), parse(text)))
    draws = [torch.Generator().manual_seed(3) for _ in range(2)]
    feed(cache, ragged(21, 30), draws[0])
    feed(plain, ragged(21, 30), draws[1])
    (mine,), (whole,) = cache.batch.stores, plain.batch.stores
    got, was = (s.read(s.table_rows(), frozenset({"keys", "values"})) for s in (mine, whole))
    form, changed = mine.layout.format, 0
    slack = 5e-3 if text.startswith("k") else 1e-5  # scales are float16
    for row, (held, all_held) in enumerate(
        zip(got.position.tolist(), was.position.tolist(), strict=True)
    ):
        kept = sorted(p for p in held if p >= 0)
        there = sorted(p for p in all_held if p >= 0)
        for p in kept:
            for codec, x, y in ((form.key, got.key, was.key), (form.value, got.value, was.value)):
                old = {q: y[row, all_held.index(q)].float() for q in there}
                want = old[p]
                if codec is form.value or keys_too:
                    want = own(p) * want
                    for q in set(there) - set(kept):
                        sides = [j for j in kept if j > q][:1], [j for j in kept if j < q][-1:]
                        for side, share in zip(sides, shares(q, 0.0), strict=True):
                            want = want + share * old[q] * (side == [p])
                    changed += int(not torch.equal(want, old[p]))
                near = codec.bound(want[None, None])[0, 0] + 3 * codec.bound(
                    torch.stack(list(old.values()))[:, None]
                ).amax((0, 1))
                assert bool(((x[row, held.index(p)].float() - want).abs() <= near + slack).all())
    assert changed > 50


def test_a_shared_prompt_is_copied_before_tokens_are_merged() -> None:
    draw = torch.Generator().manual_seed(1)
    cache = poisoned(compose(Folds(Budget(40), every=3), parse("k8v4")))
    feed(cache, ragged(33), draw)
    cache.batch.select(torch.tensor([0, 0]), share=True)
    cache._keeper.select(torch.tensor([0, 0]))
    before = stored(cache)
    rows = cache.batch.stores[0].table_rows().view(SHAPE.layers, 2, 2)
    store = cache.batch.stores[0]
    value = torch.ones(3 * 2 * 4, 5)
    some = torch.zeros(6, 33, dtype=torch.bool)
    some[:, 3:7] = True
    store.rewrite(rows[:, 1].flatten(), some, None, value)
    after = stored(cache)
    grid = [x.view(SHAPE.layers, 2, 2, *x.shape[1:]) for x in after]
    was = [x.view(SHAPE.layers, 2, 2, *x.shape[1:]) for x in before]
    for mine, old in zip(grid, was, strict=True):
        assert torch.equal(mine[:, 0], old[:, 0])
    assert torch.equal(grid[2][:, 1], was[2][:, 1])  # keys
    assert not torch.equal(grid[3][:, 1], was[3][:, 1])
    cache.batch.pool.check(cache.batch.pages())


def test_what_cannot_be_rewritten_is_refused() -> None:
    folds = Folds(Budget(BUDGET))
    with pytest.raises(ValueError, match="encodes several tokens together"):
        PolicyCache(compose(folds, Exact(1, 0, 4)), SHAPE)
    with pytest.raises(ValueError, match="latent attention"):
        PolicyCache(folds, replace(SHAPE, kv_heads=1, value_in_key=True))


@dataclass(frozen=True)
class Wrong(Folds):
    """Returns what is no merge."""

    name: ClassVar[str] = "wrong"
    how: str = ""

    def merge(self, view: MergeView) -> Merge:
        """Return it."""
        right = super().merge(view)
        target, weight = right.target, right.weight
        return {
            "type": lambda: None,
            "shape": lambda: replace(right, weight=weight[..., :1]),
            "kind": lambda: replace(right, target=target.float()),
            "dropped": lambda: replace(
                right,
                target=view.dropped.long().argmax(-1)[..., None, None].expand_as(target),
                weight=weight + 1,
            ),
            "far": lambda: replace(right, target=target + 1000, weight=weight + 1),
            "nan": lambda: replace(right, own=right.own / 0 * 0),
        }[self.how]()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("type", "wrong merged layer 0 with a NoneType; merge"),
        ("shape", "target int64 of shape"),
        ("kind", "target float32 of shape .* must be integers"),
        ("dropped", "into a token that is not kept"),
        ("far", "into a token that is not kept"),
        ("nan", "not finite"),
    ],
)
def test_what_is_no_merge_is_refused(how: str, message: str) -> None:
    cache = poisoned(Wrong(Budget(BUDGET), how=how))
    with pytest.raises(ValueError, match=message):
        feed(cache, ragged(21, 30), torch.Generator())


def test_thresholds_go_with_their_sequences() -> None:
    draw = torch.Generator().manual_seed(1)
    cache = poisoned(Folds(Budget(BUDGET), every=2))
    feed(cache, ragged(21, 5), draw)
    keeper = cache._keeper
    assert keeper.plans().thresholds[0, :, 0].eq(1).all()
    assert keeper.plans().thresholds[0, :, 1].eq(0).all()  # nothing is dropped
    cache.select(torch.tensor([1, 0]))
    assert keeper.plans().thresholds[0, 0].tolist() == [[0, 0], [1, 1]]
    for _ in range(4):
        feed(cache, one(), draw)
    assert keeper.plans().thresholds[0, 0].tolist() == [[0, 0], [3, 3]]
