"""The cache under a basis, against attention over what the basis leaves of each vector."""

from dataclasses import replace

import pytest
import torch

from kv_paging import PoolExhausted
from kv_policy import Budget, LayerBasis, Rope, compose, parse
from kv_runtime.bases import Bases
from kv_runtime.cache import PolicyCache
from native import need
from tiered_policies import POLICIES, SHAPE, Cut, Exact, Turned
from tiered_world import World, one, ragged

ALIKE = Turned("4", "3")
RAGGED = Turned("6253", "154")  # each head of each layer has ranks of its own
FEW = Turned("622256", "133341")  # two layers have a kind in common, one has heads of one kind only
PAIRED = Turned("425", "35", paired=True)
TOGETHER = Turned("75", "46", together=2)
SHIFTED = Turned("6", "5", paired=True, shifted=True)  # attention is invariant to a shift
CUT = Cut("6253", "154")
CUT_ALIKE = Cut("4", "3")
PAIRED_WHOLE = replace(SHIFTED, shifted=False)
NAMES = (
    "streaming",
    "snapkv-window",
    "bykey-model-replan",
    "ladder-window",
    "bykey-blocks",
    "leankv",
    "kv-compress-leankv",
)


def through(world: World) -> None:
    """Prompts, steps, a prompt's second part, beams, steps."""
    world.forward(ragged(31, 18))
    world.go_on(5)
    world.forward(ragged(3, 11))
    world.go_on(3)
    world.cache.select(torch.tensor([1, 1, 0]))
    world.sequences, chosen = 3, torch.tensor([1, 1, 0])
    world.key, world.value = world.key[:, chosen], world.value[:, chosen]
    world.seen = world.seen[chosen]
    world.go_on(3)


@pytest.mark.parametrize("name", NAMES)
def test_attention_is_over_what_ragged_heads_keep(name: str) -> None:
    through(World(compose(POLICIES[name], FEW)))


@pytest.mark.parametrize(
    "basis", [ALIKE, RAGGED, PAIRED, TOGETHER, SHIFTED, CUT, CUT_ALIKE], ids=repr
)
@pytest.mark.parametrize("window", [0, 5])
def test_attention_without_a_selector(basis: Turned, window: int) -> None:
    through(World(compose(Exact(1, window), basis)))


@pytest.mark.parametrize("basis", [ALIKE, PAIRED, TOGETHER, SHIFTED, CUT, CUT_ALIKE], ids=repr)
def test_other_bases_beside_a_selector(basis: Turned) -> None:
    through(World(compose(POLICIES["kv-compress-window"], basis)))


@pytest.mark.parametrize(
    ("more", "what"), [({"softcap": 3.0}, "a soft cap"), ({"sinks": None}, "attention sinks")]
)
def test_shifted_keys_are_refused_where_attention_changes(
    more: dict[str, float | None], what: str
) -> None:
    more = {"sinks": torch.zeros(3, 2, 2)} if "sinks" in more else more
    World(compose(Exact(1), ALIKE), **more).forward(one())
    with pytest.raises(ValueError, match=f"changes the attention of layers with {what}"):
        World(compose(Exact(1), SHIFTED), **more).forward(one())


def test_layers_may_share_maps_which_then_count_once() -> None:
    class Shared(Turned):
        def bind(self, layer, shape):
            found = super().bind(0, shape)
            one = found.key.matrix[:1].expand(shape.kv_heads, -1, -1)
            return maps.setdefault(0, replace(found, key=replace(found.key, matrix=one)))

    maps: dict[int, LayerBasis] = {}
    bases = Bases.of(Shared(), SHAPE, torch.device("cpu"))
    assert len({id(x) for x in bases.key_maps}) == 1
    assert bases.nbytes == 4 * (6 * 6 + 2 * 5 * 5)
    through(World(compose(Exact(1), Shared())))


def test_caches_whose_keys_are_shifted_otherwise_share_no_prefill() -> None:
    plain, shifted = (
        PolicyCache(compose(Exact(1), basis), SHAPE, page_tokens=4)
        for basis in (PAIRED_WHOLE, SHIFTED)
    )
    with pytest.raises(ValueError, match="in another basis"):
        plain.share_prefill([shifted])


def test_ragged_blocks_and_a_window() -> None:
    through(World(compose(Exact(1, 5, block=4), RAGGED)))


def test_heads_of_the_same_ranks_are_of_one_kind() -> None:
    for basis, kinds in ((RAGGED, 6), (FEW, 3), (ALIKE, 1)):
        layout = PolicyCache(compose(Exact(1), basis), SHAPE, page_tokens=4).layout
        assert len(layout.shapes) == kinds
    layout = PolicyCache(compose(Exact(1), FEW), SHAPE, page_tokens=4).layout
    assert layout.kind == ((1, 2), (2, 2), (0, 1))
    assert len({tier.tokens for tiers in layout.pages for tier in tiers}) == 3


def test_bytes_are_those_of_the_ranks() -> None:
    cache = PolicyCache(compose(Exact(1), RAGGED), SHAPE, page_tokens=4)
    assert cache.bases is not None
    assert cache.bases.key_dims == ((6, 2), (5, 3), (6, 2))
    assert cache.bases.value_dims == ((1, 5), (4, 1), (5, 4))
    cache.begin(torch.ones(1, 60, dtype=torch.bool))
    q, k, v = (torch.randn(1, 2, 60, d) for d in (6, 6, 5))
    for layer in range(3):
        cache.attend(layer, q[:, :, None], k, v, 1.0)
    report = cache.memory()
    numbers = sum(map(sum, (*cache.bases.key_dims, *cache.bases.value_dims)))
    assert report.vector_bytes == 60 * 4 * numbers
    assert report.full_bytes == 60 * 4 * 6 * 11
    assert report.basis_bytes == 4 * 3 * 2 * (6 * 6 + 5 * 5)
    kinds = {layout.tokens for tiers in cache.layout.pages for layout in tiers}
    assert len(kinds) > 2
    assert report.total_bytes < report.full_bytes


def test_a_fixed_pool_of_ragged_heads_runs_dry_before_anything_changes() -> None:
    cache = PolicyCache(compose(Exact(1), RAGGED), SHAPE, page_tokens=4, pages=40)
    with pytest.raises(PoolExhausted):
        cache.begin(torch.ones(1, 400, dtype=torch.bool))
    cache.begin(torch.ones(1, 20, dtype=torch.bool))
    assert cache.batch is not None
    assert cache.batch.pool.capacity == 40


def test_caches_of_one_basis_share_a_prompt() -> None:
    policies = [compose(Exact(1), RAGGED), compose(parse("snapkv:budget=14,window=4"), RAGGED)]
    world = World(policies[0])
    follower = World(policies[1])
    follower.key, follower.value = world.key, world.value
    world.cache.share_prefill([follower.cache])
    world.forward(ragged(31, 18))
    follower.seen = world.seen.clone()
    follower.go_on(4)
    world.go_on(4)


def test_budgets_in_bytes_count_the_ranks() -> None:
    """A token takes 11 numbers a head without a basis, and on average fewer with one."""
    budget = Budget(78, "bytes")  # a quarter of 3 * 2 * (11 * 4 + 8), of each token seen
    counts = []
    for basis in (None, Turned("2", "2")):
        policy = parse("streaming:sinks=1")
        policy = policy if basis is None else compose(policy, basis)
        cache = PolicyCache(policy, SHAPE, page_tokens=4, budgets=[budget])
        cache.begin(torch.ones(1, 90, dtype=torch.bool))
        for layer in range(3):
            q, k, v = (torch.randn(1, 2, 90, d) for d in (6, 6, 5))
            cache.attend(layer, q[:, :, None], k, v, 1.0)
        counts.append(int(cache.memory().tokens.max()))
    assert counts == [90 * 78 // 312, 90 * 78 // 144]


def test_turning_queries_under_a_basis_is_refused() -> None:
    shape = replace(SHAPE, rope=Rope((1.0, 0.5, 0.2)))
    PolicyCache(parse("expected-attention:budget=20"), shape)
    with pytest.raises(ValueError, match="its basis stores keys for which this is impossible"):
        PolicyCache(compose(parse("expected-attention:budget=20"), ALIKE), shape)


def test_what_is_folded_comes_and_goes_as_coordinates() -> None:
    bases = Bases.of(RAGGED, SHAPE, torch.device("cpu"))
    plain = PolicyCache(compose(Exact(1), RAGGED), SHAPE, page_tokens=4)
    folded = PolicyCache(
        compose(Exact(1), RAGGED), SHAPE, page_tokens=4, folded=frozenset({"keys", "values"})
    )
    for width in (9, 1, 1):
        for cache in (plain, folded):
            cache.begin(torch.ones(1, width, dtype=torch.bool))
        for layer in range(3):
            q, k, v = (torch.randn(1, 2, width, d) for d in (6, 6, 5))
            want = plain.attend(layer, q[:, :, None], k, v, 0.3)
            out = folded.attend(
                layer,
                bases.queries(layer, q[:, :, None]),
                bases.keys(layer, k),
                bases.values(layer, v),
                0.3,
            )
            torch.testing.assert_close(bases.undone(layer, out, 5), want)


def test_layers_must_store_equally_many_heads_together() -> None:
    class Mixed(Turned):
        def bind(self, layer, shape):
            return (TOGETHER if layer else ALIKE).bind(layer, shape)

    with pytest.raises(ValueError, match="layers store 1, 2 KV heads together"):
        PolicyCache(compose(Exact(1), Mixed()), SHAPE)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_one_token_at_a_time_is_one_prompt(backend: str) -> None:
    """Chunks of a prompt and single tokens leave the same coordinates behind.

    A native step maps its tokens itself, whose sums are in another order.
    """
    need(backend)
    whole = World(compose(Exact(1), RAGGED), sequences=1, backend=backend)
    whole.forward(one(1))
    whole.go_on(6)
    again = World(compose(Exact(1), RAGGED), sequences=1, backend=backend)
    again.key, again.value = whole.key, whole.value
    again.forward(torch.ones(1, 7, dtype=torch.bool))
    for a, b in zip(whole.cache.batch.stores, again.cache.batch.stores, strict=True):
        mine, theirs = (s.read(s.table_rows(), frozenset({"keys", "values"})) for s in (a, b))
        for x, y in ((mine.key, theirs.key), (mine.value, theirs.value)):
            assert torch.equal(x == 0, y == 0)
            near = 0 if backend == "torch" else 1e-6
            torch.testing.assert_close(x, y, atol=near, rtol=10 * near)


@pytest.mark.parametrize("name", ["leankv", "snapkv-window", "kv-compress-window", "ladder-window"])
def test_a_prompt_that_fits_the_window_leaves_kinds_of_heads_empty(name: str) -> None:
    """While layers of other kinds have stored already, what was observed stays with its tokens."""
    world = World(compose(POLICIES[name], Turned("663333", "554444")))
    world.forward(ragged(3, 2))
    world.forward(ragged(9, 7))
    world.go_on(4)


def test_few_tokens_in_tiers_that_some_kinds_leave_empty() -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        policy = parse("leankv:high=raw,low=raw,t_high=0.02,t_low=0,window=1")
        world = World(compose(policy, RAGGED))
        world.forward(ragged(3, 2))
        world.go_on(3)


def test_caches_of_other_bases_or_with_tokens_share_no_prefill() -> None:
    plain, turned = (
        PolicyCache(parse("raw"), SHAPE),
        PolicyCache(compose(Turned(), Exact(1)), SHAPE),
    )
    with pytest.raises(ValueError, match="in another basis than raw"):
        plain.share_prefill([turned])
    plain.begin(torch.ones(1, 3, dtype=torch.bool))
    for pair in (
        (plain, PolicyCache(parse("raw"), SHAPE)),
        (PolicyCache(parse("raw"), SHAPE), plain),
    ):
        with pytest.raises(ValueError, match="holds tokens cannot share a prefill"):
            pair[0].share_prefill([pair[1]])


@pytest.mark.parametrize("basis", [CUT, CUT_ALIKE], ids=repr)
def test_truncated_values_have_no_map(basis: Cut) -> None:
    bases = Bases.of(basis, SHAPE, torch.device("cpu"))
    assert bases.value_maps == (None,) * SHAPE.layers
    value = torch.randn(2, SHAPE.kv_heads, 3, SHAPE.value_dim)
    for layer in range(SHAPE.layers):
        maps = basis.bind(layer, SHAPE).value
        assert maps is not None
        width = bases.stored.value_dim
        assert torch.equal(
            bases.values(layer, value)[..., : maps.matrix.shape[2]], maps.project(value)
        )
        out = torch.randn(2, SHAPE.kv_heads, SHAPE.group, 3, width)
        back = bases.undone(layer, out, SHAPE.value_dim)
        assert torch.equal(back[..., :width], out)
        assert back.shape[-1] == SHAPE.value_dim
        assert not back[..., width:].any()
    turned = Bases.of(Turned(basis.key_ranks, basis.value_ranks), SHAPE, torch.device("cpu"))
    assert bases.stored == turned.stored
    assert bases.kinds == turned.kinds
    assert bases.nbytes < turned.nbytes


def test_a_model_with_a_value_basis_takes_no_other_maps_of_values() -> None:
    folded = replace(SHAPE, folded="0123456789abcdef")
    PolicyCache(CUT, folded)
    PolicyCache(parse("k8v4"), folded)
    for basis in (ALIKE, SHIFTED):
        with pytest.raises(
            ValueError, match="maps values, but this model's weights hold the value"
        ):
            PolicyCache(basis, folded)
