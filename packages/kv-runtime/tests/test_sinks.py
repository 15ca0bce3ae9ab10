"""A cache of a model with attention sinks and a bound of logits, against plain softmax."""

import jaxtyping
import pytest
import torch
from torch import Tensor

from kv_attention import Attended
from kv_policy import compose, parse
from kv_runtime import PolicyCache
from kv_runtime.token_rows import TokenRows
from native import need
from tiered_policies import POLICIES, SHAPE, Exact, Turned
from tiered_world import World, one, ragged

BASES = {
    "turned": compose(Turned(), parse("raw")),
    "together": compose(Turned("7", "6", together=2), parse("raw")),
    "ranks": compose(Turned("6253", "154"), parse("raw")),
}
SOFTMAX = [(None, True), (1.2, False), (1.2, True)]


def drawn_sinks() -> Tensor:
    g = torch.Generator().manual_seed(9)
    return 1.5 + torch.randn(SHAPE.layers, SHAPE.kv_heads, SHAPE.group, generator=g)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize(("softcap", "sinks"), SOFTMAX)
@pytest.mark.parametrize("name", ["raw", *BASES, "streaming-window", "snapkv"])
def test_attention_is_plain_softmax_with_sinks_and_a_bound(name, softcap, sinks, backend) -> None:
    need(backend)
    policy = ({"raw": parse("raw")} | BASES | POLICIES)[name]
    world = World(policy, softcap=softcap, sinks=drawn_sinks() if sinks else None, backend=backend)
    world.forward(ragged(31, 18))
    for _ in range(3):
        world.forward(one())
    world.forward(ragged(3, 11))
    world.forward(one())


class Kept(PolicyCache):
    """A cache that remembers the observations of each layer."""

    def keep(self, layer, key, value, result: Attended, *rest) -> None:
        self.last = result
        super().keep(layer, key, value, result, *rest)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize(("softcap", "sinks"), SOFTMAX)
def test_the_observed_mass_is_that_of_the_softmax_with_the_sinks(softcap, sinks, backend) -> None:
    need(backend)
    policy = parse("h2o:budget=90")
    by_layer = drawn_sinks() if sinks else None
    near = 1e-4 + (2**-11 if backend == "cpu" else 0)  # which sums weights of a prompt in 16 bits
    cache = Kept(policy, SHAPE, backend=backend)
    cache._decode_rows = None  # it adds masses to the scores in pages, which the next test reads
    g = torch.Generator().manual_seed(2)
    lead = (1, SHAPE.kv_heads)
    keys: list[Tensor] = [torch.empty(*lead, 0, SHAPE.key_dim)] * SHAPE.layers
    for tokens in (20, 1, 1):
        cache.begin(torch.ones(1, tokens, dtype=torch.bool))
        for layer in range(SHAPE.layers):
            query = torch.randn(*lead, SHAPE.group, tokens, SHAPE.key_dim, generator=g)
            key = torch.randn(*lead, tokens, SHAPE.key_dim, generator=g)
            value = torch.randn(*lead, tokens, SHAPE.value_dim, generator=g)
            keys[layer] = torch.cat((keys[layer], key), 2)
            mine = None if by_layer is None else by_layer[layer]
            what = cache.observe
            assert (what.group, what.power, what.skip) == ("mean", 1, 0)
            cache.attend(layer, query, key, value, 0.9, softcap, mine)
            x = query @ keys[layer][:, :, None].mT * 0.9
            x = x if softcap is None else softcap * (x / softcap).tanh()
            later = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1 + x.shape[-1] - tokens)
            x = x.masked_fill(later, -torch.inf)
            if mine is not None:
                x = torch.cat((x, mine[None, :, :, None, None].expand(*x.shape[:-1], 1)), -1)
            want = x.softmax(-1)[..., : keys[layer].shape[2]].sum(3).mean(2)
            found = torch.cat([m for m in cache.last.mass if m.shape[-1]], -1)
            # Nothing is evicted, and a table of pages keeps the order of tokens.
            torch.testing.assert_close(found.sum(-1), want.sum(-1), rtol=near, atol=1e-5)
            found, want = found.sort(-1).values, want.sort(-1).values
            torch.testing.assert_close(found, want, rtol=near, atol=1e-5)


@pytest.mark.parametrize(("softcap", "sinks"), SOFTMAX)
def test_scores_in_pages_are_those_of_the_masses_with_the_sinks(softcap, sinks) -> None:
    need("cpu")
    by_layer = drawn_sinks() if sinks else [None] * SHAPE.layers
    fast, slow = (PolicyCache(parse("h2o:budget=90"), SHAPE, backend="cpu") for _ in range(2))
    slow._decode_rows = None
    in_rows, results = fast._decode_rows, []
    fast._decode_rows = lambda inputs: results.append(in_rows(inputs)) or results[-1]
    g = torch.Generator().manual_seed(2)
    lead = (1, SHAPE.kv_heads)
    for tokens in (20, 1, 1, 1):
        for cache in (fast, slow):
            cache.begin(torch.ones(1, tokens, dtype=torch.bool))
        for layer in range(SHAPE.layers):
            query = torch.randn(*lead, SHAPE.group, tokens, SHAPE.key_dim, generator=g)
            key = torch.randn(*lead, tokens, SHAPE.key_dim, generator=g)
            value = torch.randn(*lead, tokens, SHAPE.value_dim, generator=g)
            given = (layer, query, key, value, 0.9, softcap, by_layer[layer])
            torch.testing.assert_close(fast.attend(*given), slow.attend(*given))
    assert len(results) == 3 * SHAPE.layers
    assert all(result.rescored for result in results)
    reads = []
    for cache in (fast, slow):
        rows = cache.batch.table_rows(slice(0, SHAPE.layers))
        reads.append([store.read(rows) for store in cache.batch.stores])
    for found, want in zip(*reads, strict=True):
        assert torch.equal(found.position, want.position)
        torch.testing.assert_close(found.score[found.held], want.score[want.held])
        assert found.score[found.held].any()


def test_rows_of_an_engine_carry_sinks_by_query_head() -> None:
    cache, bare = (PolicyCache(Exact(1, 5), SHAPE) for _ in range(2))
    g = torch.Generator().manual_seed(4)
    heads = SHAPE.kv_heads * SHAPE.group
    part = TokenRows.of(cache, torch.arange(9)[None], torch.device("cpu"))
    part.begin(prompt=True)
    bare.begin(torch.ones(1, 9, dtype=torch.bool))
    for layer, sinks in enumerate(drawn_sinks()):
        query = torch.randn(9, heads, SHAPE.key_dim, generator=g)
        key = torch.randn(9, SHAPE.kv_heads, SHAPE.key_dim, generator=g)
        value = torch.randn(9, SHAPE.kv_heads, SHAPE.value_dim, generator=g)
        out = torch.empty(9, heads, SHAPE.value_dim)
        part.attend(layer, query, key, value, 0.5, out, 2.0, sinks.flatten())
        grouped = query.unflatten(1, (SHAPE.kv_heads, -1)).permute(1, 2, 0, 3)[None]
        fresh = (x.transpose(0, 1)[None] for x in (key, value))
        want = bare.attend(layer, grouped, *fresh, 0.5, 2.0, sinks)
        torch.testing.assert_close(out, want[0].permute(2, 0, 1, 3).flatten(1, 2))


def test_sinks_of_other_heads_and_a_bound_of_zero_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    cache = PolicyCache(parse("raw"), SHAPE)
    query = torch.zeros(1, SHAPE.kv_heads, SHAPE.group, 1, SHAPE.key_dim)
    key, value = (torch.zeros(1, SHAPE.kv_heads, 1, d) for d in (SHAPE.key_dim, SHAPE.value_dim))
    cache.begin(torch.ones(1, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="softcap is 0"):
        cache.attend(0, query, key, value, 1.0, 0.0)
    with pytest.raises(ValueError, match="sinks are"):
        cache.attend(0, query, key, value, 1.0, None, torch.zeros(4, 1))
