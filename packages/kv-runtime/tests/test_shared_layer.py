"""Layers that share keys and values, and queries that see later tokens of their pass."""

import pytest
import torch

from kv_policy import CacheShape, parse
from kv_runtime import PolicyCache

LENGTH, DIM = 19, 8
BOTH = CacheShape(layers=2, kv_heads=2, group=4, key_dim=DIM, value_dim=DIM, dtype=torch.float32)


def drawn(seed: int, length: int, group: int = 2) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    query = torch.randn(1, 2, group, length, DIM, generator=g)
    key, value = (torch.randn(1, 2, length, DIM, generator=g) for _ in range(2))
    return query, key, value


def passes(cache: PolicyCache, seed: int, length: int, *, apart: bool) -> list[torch.Tensor]:
    """Run a pass whose last layer is read by another; together, they are one of twice the heads."""
    cache.begin(torch.ones(1, length, dtype=torch.bool))
    query, key, value = drawn(seed, length, 4)
    out = [cache.attend(0, query, key, value, 0.3)]
    query, key, value = drawn(seed + 1, length, 4)
    if not apart:
        return [*out, cache.attend(1, query, key, value, 0.3)]
    own, reader = query.split(2, 2)
    halves = (
        cache.attend(1, own, key, value, 0.3, more=True),
        cache.attend(1, reader, key, value, 0.3),
    )
    return [*out, torch.cat(halves, 2)]


@pytest.mark.parametrize(
    "spec", ["raw", "k8v4", "h2o:budget=12", "kv-compress:budget=12", "snapkv:budget=12,window=4"]
)
def test_a_layer_and_its_reader_are_as_one_of_all_their_heads(spec) -> None:
    one, two = (PolicyCache(parse(spec), BOTH) for _ in range(2))
    for step, length in enumerate((LENGTH, 1, 1, 1)):
        want = passes(one, 10 * step, length, apart=False)
        got = passes(two, 10 * step, length, apart=True)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert torch.equal(one.memory().tokens, two.memory().tokens)


def test_a_reader_may_omit_the_first_columns() -> None:
    cache = PolicyCache(parse("raw"), BOTH)
    query, key, value = drawn(3, LENGTH, 4)
    cache.begin(torch.ones(1, LENGTH, dtype=torch.bool))
    with pytest.raises(ValueError, match="1 queries attend in a pass of 19 columns"):
        cache.attend(0, query[..., -1:, :], key, value, 0.3)
    whole = cache.attend(0, query, key, value, 0.3, more=True)
    last = cache.attend(0, query[..., -1:, :], key, value, 0.3)
    torch.testing.assert_close(last, whole[..., -1:, :], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "torch", "auto"])
@pytest.mark.parametrize("padding", [0, 3])
def test_queries_see_up_to_their_reach(backend, padding) -> None:
    cache = PolicyCache(parse("raw"), BOTH, backend=backend)
    valid = torch.arange(LENGTH)[None] >= padding
    reach = torch.arange(LENGTH)[None].clone()
    reach[0, 4:9] = 8  # a picture
    query, key, value = drawn(5, LENGTH, 4)
    sees = (torch.arange(LENGTH) <= reach[0, :, None]) & valid
    cache.begin(valid, reach=reach)
    got = cache.attend(0, query, key, value, 0.3)
    logits = (query @ key[:, :, None].mT * 0.3).masked_fill(~sees, -torch.inf)
    want = logits.softmax(-1) @ value[:, :, None]
    torch.testing.assert_close(got[..., padding:, :], want[..., padding:, :], rtol=1e-5, atol=1e-5)
