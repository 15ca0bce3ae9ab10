"""What decode passes in rows share: layers of one pass, and passes over the same tensors."""

import pytest
import torch
from torch import Tensor

from kv_paging import PagePool
from kv_policy import compose, parse
from kv_runtime.cache import PolicyCache
from kv_runtime.layout import Layout
from native import need
from tiered_policies import SHAPE, Turned

PAGE_TOKENS = 4
POLICIES = ["raw", "h2o:budget=90", "leankv:window=5", "snapkv:budget=9,window=4"]
QUERIES = SHAPE.kv_heads * SHAPE.group


RANKS = "k8v4:window=5 at different ranks"


def made(policy: str, *, grows: bool = False, own: bool = False) -> PolicyCache:
    """Give a cache over a pool that does not grow, unless asked, or with one of its own."""
    need("cpu")
    read = parse(policy.removesuffix(" at different ranks"))
    if policy == RANKS:
        read = compose(read, Turned(key_ranks="63", value_ranks="5"))
    if own:
        return PolicyCache(read, SHAPE, page_tokens=PAGE_TOKENS, backend="cpu")
    nbytes = Layout.of(read, SHAPE, None, PAGE_TOKENS, pooled=True).page_bytes
    pool = PagePool(nbytes, 400, grows=grows, poison=True)
    return PolicyCache(read, SHAPE, page_tokens=PAGE_TOKENS, pool=pool, backend="cpu")


class Pair:
    """A cache that decodes in rows, and one that takes layer by layer, given the same tokens."""

    def __init__(self, policy: str, *, grows: bool = False, own: bool = False) -> None:
        self.rows, self.plain = (made(policy, grows=grows, own=own) for _ in range(2))
        self.in_rows, self.plain._decode_rows = self.rows._decode_rows, None
        self.g = torch.Generator().manual_seed(7)
        # Products with a basis are rounded differently, and so are the codes' scales.
        self.close = {"rtol": 1e-4, "atol": 1e-4 if policy == RANKS else 1e-5}

    @property
    def caches(self) -> tuple[PolicyCache, PolicyCache]:
        return self.rows, self.plain

    def run(self, tokens: int, sequences: int = 2, layers: int = SHAPE.layers) -> None:
        """Do a pass, or its first layers, and expect the same output."""
        for cache in self.caches:
            cache.begin(torch.ones(sequences, tokens, dtype=torch.bool))
        for layer in range(layers):
            lead = sequences, SHAPE.kv_heads
            query = torch.randn(*lead, SHAPE.group, tokens, SHAPE.key_dim, generator=self.g)
            key = torch.randn(*lead, tokens, SHAPE.key_dim, generator=self.g)
            value = torch.randn(*lead, tokens, SHAPE.value_dim, generator=self.g)
            found, wanted = (
                cache.attend(layer, query, key, value, 0.5).clone() for cache in self.caches
            )
            torch.testing.assert_close(found, wanted, **self.close)

    def expect_same_tokens(self) -> None:
        """Expect the same tokens with the same scores in all pages."""
        for mine, theirs in zip(*map(stored, self.caches), strict=True):
            torch.testing.assert_close(mine, theirs, **self.close)


def stored(cache: PolicyCache) -> list[Tensor]:
    """Return the tokens of every store, and of the window."""
    batch, found = cache.batch, []
    for store in batch.tiers.stores:
        held = store.read(store.table_rows(), frozenset({"keys", "values"}))
        some = held.held
        found += [store.length, held.key[some], held.value[some]]
        found += [x[some] for x in (held.score, held.position) if x is not None]
    if batch.window is not None:
        found.append(batch.window.position)
        found += [x for i in range(SHAPE.layers) for x in batch.window.in_order(i)]
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("prompt", [2, 11])  # shorter than a window, and longer
def test_a_pass_is_prepared_once_for_those_over_the_same_tensors(policy, prompt) -> None:
    pair = Pair(policy)
    pair.run(prompt)
    made = []
    for _ in range(9):
        pair.run(1)
        assert pair.rows._last_rows.together
        made.append(pair.rows._last_rows)
    assert len({id(each) for each in made}) < len(made)  # others have wider tables
    pair.expect_same_tokens()
    for cache in pair.caches:
        cache.select(torch.tensor([1, 1, 0]))  # tables and lengths are other tensors now
    for _ in range(9):
        pair.run(1, 3)
        assert not any(pair.rows._last_rows is each for each in made)
    pair.expect_same_tokens()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pool_that_grows_is_not_held_by_an_earlier_pass(policy: str) -> None:
    pair = Pair(policy, grows=True)
    pair.run(11)
    for _ in range(3):
        pair.run(1)
        assert pair.rows._last_rows.source is None
    pair.expect_same_tokens()


@pytest.mark.parametrize("policy", [*POLICIES, "leankv:window=4", "k8v4:window=5", RANKS])
@pytest.mark.parametrize("prompt", [2, 11])
def test_a_window_outside_the_pool_is_read_in_rows_too(policy: str, prompt: int) -> None:
    pair = Pair(policy, own=True)
    pair.run(prompt)
    for sequences, order in ((2, [1, 1, 0]), (3, [2])):
        for _ in range(9):
            pair.run(1, sequences)
            assert pair.rows._last_rows is not None
            assert pair.rows._last_rows.together
        pair.expect_same_tokens()
        for cache in pair.caches:
            cache.select(torch.tensor(order))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("declined", range(SHAPE.layers))
def test_layers_before_one_that_is_taken_alone_are_taken_too(policy: str, declined: int) -> None:
    pair = Pair(policy)
    pair.run(11)
    pair.run(1)
    calls = []

    def in_rows(inputs):
        calls.append(inputs)
        return None if len(calls) == declined + 1 else pair.in_rows(inputs)

    pair.rows._decode_rows = in_rows
    pair.run(1)
    assert len(calls) == declined + 1  # a pass does not come back to rows
    pair.rows._decode_rows = pair.in_rows
    pair.run(1)
    assert pair.rows._rows.results == []
    pair.expect_same_tokens()


# Others have scores that a pass changes layer by layer.
@pytest.mark.parametrize("policy", ["raw", "snapkv:budget=9,window=4"])
def test_a_pass_that_is_not_finished_leaves_no_tokens(policy: str) -> None:
    pair = Pair(policy)
    pair.run(11)
    pair.run(1)
    pair.run(1, layers=1)
    for cache in pair.caches:
        cache.clear([])
    for _ in range(2):
        pair.run(1)
    pair.expect_same_tokens()
