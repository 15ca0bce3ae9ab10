"""A cache that is restored from its state attends as the one that the state is of."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kv_paging import PagePool, PoolExhausted
from kv_policy import Budget, KVPolicy, compose, parse
from kv_runtime import CacheState, PolicyCache
from passes import Passes, expect_alike, filled
from tiered_policies import POLICIES, SHAPE, Exact, Turned
from tiered_world import one, ragged

FEW = Turned("622256", "133341")  # heads of several kinds
BASES = {
    "alike": compose(Exact(1, 3), Turned("4", "3")),
    "ragged": compose(Exact(1, 4), Turned("6253", "154")),
    "few": compose(POLICIES["kv-compress-leankv"], FEW),
    "few-blocks": compose(POLICIES["bykey-blocks"], FEW),
    "paired": compose(POLICIES["kv-compress-window"], Turned("425", "35", paired=True)),
    "together": compose(Exact(), Turned("75", "46", together=2)),
}
TEXTS = {
    text: parse(text)
    for text in (
        "raw",
        "k8v4:keys=channel",
        "k4v2:window=4",
        "h2o:budget=8+k8v4:keys=channel,window=3",
        "kv-compress:budget=10,window=4,recent=4,every=3,most=40",
        "leankv:high=k8v4,low=k4v2,t_high=0.3,window=4",
    )
}
EVERY: dict[str, KVPolicy] = POLICIES | BASES | TEXTS
KINDS = (  # of stores, windows, plans and scores
    "streaming-window",
    "bykey-replan",
    "ladder-blocks",
    "leankv-drop",
    "kv-compress-turns",
    "r-kv-window",
    "keyformer",
    *BASES,
    *TEXTS,
)
WHOLE_PAGES = ("kv-compress", "few", "paired")  # policies that free whole pages of any size


def restored(state: CacheState, policy: KVPolicy, page_tokens: int = 4) -> PolicyCache:
    cache = PolicyCache(policy, SHAPE, page_tokens=page_tokens)
    cache.restore(state)
    return cache


@pytest.mark.parametrize("name", KINDS)
def test_a_restored_cache_goes_on_exactly_as_the_saved_one(name: str) -> None:
    cache = filled(EVERY[name], (41, 7), 5)
    expect_alike([cache, restored(cache.state(), EVERY[name])], seed=2)


@given(
    name=st.sampled_from(sorted(EVERY)),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    steps=st.integers(0, 6),
)
@settings(max_examples=10)
def test_lengths_and_steps_make_no_difference(name: str, lengths: list[int], steps: int) -> None:
    cache = filled(EVERY[name], tuple(lengths), steps)
    expect_alike([cache, restored(cache.state(), EVERY[name])], seed=2)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "few-blocks"])
def test_a_state_has_no_page_size(name: str) -> None:
    cache = filled(EVERY[name], (37, 9), 5)
    state = cache.state()
    other = restored(state, EVERY[name], page_tokens=32)
    again = other.state()
    assert again.facts == state.facts
    assert again.tensors.keys() == state.tensors.keys()
    for each, x in state.tensors.items():
        assert torch.equal(again.tensors[each], x), each
    if not name.startswith(WHOLE_PAGES) or "blocks" in name:
        expect_alike([cache, other], seed=3, near=1e-6)


@pytest.mark.parametrize("name", ["raw", "h2o:budget=8+k8v4:keys=channel,window=3", "few"])
def test_a_state_holds_the_bytes_of_the_tokens_and_few_others(name: str) -> None:
    cache = filled(EVERY[name], (120, 70), 1)
    state, report = cache.state(), cache.memory()
    held = report.vector_bytes + report.score_bytes + report.position_bytes
    stored = {k: x.nbytes for k, x in state.tensors.items() if k.startswith("store")}
    counts = sum(nbytes for k, nbytes in stored.items() if k.endswith("length"))
    assert sum(stored.values()) - counts == held
    assert counts == 4 * sum(store.length.numel() for store in cache.batch.tiers.parts)
    others = {k for k in state.tensors if not k.startswith(("store", "window"))}
    assert others <= {"seen", "columns", "plan.budget", "plan.thresholds"}


def test_budgets_of_sequences_outlive_their_cache() -> None:
    policy = parse("snapkv:budget=8,window=4")
    cache = PolicyCache(policy, SHAPE, budgets=[Budget(6), Budget(50, "percent"), None])
    Passes(1).over([cache], ragged(40, 30, 20))
    expect_alike([cache, restored(cache.state(), policy)], seed=4)


def test_a_restored_cache_is_repeated_and_cut_as_any_other() -> None:
    cache = filled(parse("raw"), (12, 5), 2)
    both = [cache, restored(cache.state(), parse("raw"))]
    for each in both:
        each.roll_back(3)
        each.select(torch.tensor([0, 0, 1]))
    expect_alike(both, seed=5)


def test_a_restored_cache_is_saved_again() -> None:
    policy = parse("h2o:budget=8+k8v4:window=3")
    cache = filled(policy, (30,), 4)
    first = restored(cache.state(), policy)
    expect_alike([cache, restored(first.state(), policy)], seed=6)


def state_of(text: str) -> CacheState:
    return filled(parse(text), (20, 11), 2).state()


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[CacheState], CacheState]:
    def made(state: CacheState) -> CacheState:
        return replace(state, tensors={**state.tensors, name: change(state.tensors[name])})

    return made


def without(name: str) -> Callable[[CacheState], CacheState]:
    def made(state: CacheState) -> CacheState:
        return replace(state, tensors={k: x for k, x in state.tensors.items() if k != name})

    return made


def first(value: int) -> Callable[[Tensor], Tensor]:
    def made(x: Tensor) -> Tensor:
        x = x.clone()
        x.view(-1)[0] = value
        return x

    return made


WRONG = {
    "lengths of other rows": (changed("store.0.length", first(9)), "part should be"),
    "a negative length": (changed("store.0.length", first(-1)), "negative"),
    "a position before all": (changed("store.0.position", first(-1)), "not that of a token seen"),
    "a position after all": (changed("store.0.position", first(99)), "not that of a token seen"),
    "a missing part": (without("store.0.part.1"), "store.0.part.1 is missing"),
    "a missing score": (without("store.0.score"), "store.0.score is missing"),
    "a part that is cut": (changed("store.0.part.0", lambda x: x[:-1]), "part should be"),
    "numbers of another kind": (changed("store.0.score", lambda x: x.int()), "score should be"),
    "a part too many": (changed("seen", lambda x: x), "unknown tensors: more"),
    "other tokens seen": (changed("seen", first(3)), "not those of its columns"),
    "fewer columns": (changed("columns", lambda x: x[:, :-1]), "columns should be"),
    "a smaller window": (changed("window.key", lambda x: x[:, :, :, 1:]), "window.key should be"),
    "no budget": (changed("plan.budget", first(-1)), "impossible"),
    "thresholds of other tiers": (changed("plan.budget", lambda x: x[:1]), "plan.budget should"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_state_that_contradicts_itself_is_refused_and_nothing_is_stored(name: str) -> None:
    text = "snapkv:budget=8,window=4+k8v4:window=3"
    change, message = WRONG[name]
    state = change(state_of(text))
    if name == "a part too many":
        state = replace(state, tensors={**state.tensors, "more": torch.zeros(1)})
    cache = PolicyCache(parse(text), SHAPE)
    with pytest.raises(ValueError, match=message):
        cache.restore(state)
    assert cache.batch is None
    cache.restore(state_of(text))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": "raw"}, "of the policy raw, not of k8v4"),
        ({"sizes": (3, 2, 6, 6)}, "of another model"),
        ({"dtype": "float16"}, "of another model"),
        ({"basis": "0"}, "calibration of k8v4 has changed"),
        ({"levels": "0"}, "calibration of k8v4 has changed"),
        ({"folded": ("values",)}, "folded into the model's values"),
        ({"sequences": 0}, "holds 0 sequences"),
        ({"sequences": 5}, "seen should be"),
        ({"columns": 10**12}, "columns should be"),
    ],
)
def test_a_state_of_something_else_is_refused(change: dict[str, object], message: str) -> None:
    state = state_of("k8v4")
    cache = PolicyCache(parse("k8v4"), SHAPE)
    with pytest.raises(ValueError, match=message):
        cache.restore(replace(state, facts=replace(state.facts, **change)))


def test_counts_of_plans_that_are_impossible_are_refused() -> None:
    state = state_of("h2o:budget=8")
    turns = state.facts.turns
    assert turns is not None
    for wrong in (
        replace(turns, planned=(1,)),
        replace(turns, passes=-1),
        replace(turns, steps=(2**63, 0)),
    ):
        cache = PolicyCache(parse("h2o:budget=8"), SHAPE)
        with pytest.raises(ValueError, match="counts of plans"):
            cache.restore(replace(state, facts=replace(state.facts, turns=wrong)))


def test_tokens_that_are_missing_are_noticed_where_all_are_kept() -> None:
    state = state_of("raw")
    tensors = dict(state.tensors)
    tensors["store.0.length"] = tensors["store.0.length"].clone()
    tensors["store.0.length"].view(-1)[-1] -= 1
    for part in ("store.0.part.0", "store.0.part.1"):
        tensors[part] = tensors[part][:-1]
    with pytest.raises(ValueError, match="lacks tokens, but the policy keeps all"):
        PolicyCache(parse("raw"), SHAPE).restore(replace(state, tensors=tensors))


def test_a_cache_says_why_it_has_no_state_or_takes_none() -> None:
    cache = PolicyCache(parse("raw"), SHAPE)
    with pytest.raises(ValueError, match="empty cache has no state"):
        cache.state()
    state = state_of("raw")
    cache.restore(state)
    with pytest.raises(ValueError, match="restored in an empty cache"):
        cache.restore(state)
    cache.begin(one())
    with pytest.raises(RuntimeError, match="stopped at layer 0 of 3"):
        cache.state()
    waits = PolicyCache(parse("k8v4"), SHAPE)
    waits.begin(one(), remaining=1)
    for layer in range(SHAPE.layers):
        key, value = torch.zeros(2, 2, 1, 6), torch.zeros(2, 2, 1, 5)
        waits.attend(layer, torch.zeros(2, 2, 2, 1, 6), key, value, 0.4)
    with pytest.raises(ValueError, match="unfinished prompts"):
        waits.state()
    pool = PagePool(waits.layout.page_bytes, 8)
    shares = PolicyCache(parse("k8v4"), SHAPE, pool=pool)
    Passes(1).over([shares], ragged(3))
    with pytest.raises(ValueError, match="shared pool cannot be saved"):
        shares.state()


@pytest.mark.parametrize("name", EVERY)
def test_a_state_is_restored_in_a_pool_that_others_use(name: str) -> None:
    policy = EVERY[name]
    saved = filled(policy, (11, 5), steps=6)
    state = saved.state()
    size = PolicyCache(policy, SHAPE, page_tokens=4).layout.page_bytes
    memory = torch.full((900, size), 255, dtype=torch.uint8)
    pool = PagePool.over(memory, poison=True)
    other, cache = (PolicyCache(policy, SHAPE, page_tokens=4, pool=pool) for _ in range(2))
    Passes(3).over([other], ragged(7, 2))
    cache.restore(state)
    other.release()
    expect_alike([saved, cache], seed=5, near=1e-5)
    cache.release()
    assert pool.used == 0


def test_a_pool_that_is_too_small_stays_empty() -> None:
    state = state_of("raw")
    pool = PagePool(PolicyCache(parse("raw"), SHAPE).layout.page_bytes, 5, grows=False)
    for room in ({"pages": 5}, {"pool": pool}):
        cache = PolicyCache(parse("raw"), SHAPE, **room)
        with pytest.raises(PoolExhausted):
            cache.restore(state)
        assert cache.batch is None
    assert pool.used == 0
