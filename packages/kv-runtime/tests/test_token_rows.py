"""The tokens of a step, given to a cache wherever they lie among those of other requests."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kv_paging import PagePool, page_kernels_of
from kv_policy import KVPolicy, compose, parse
from kv_runtime.cache import PolicyCache
from kv_runtime.token_rows import TokenRows
from native import need
from tiered_policies import POLICIES, SHAPE, Cut, Exact, Swapped, Turned

QUERIES = SHAPE.kv_heads * SHAPE.group
WITHOUT_SELECTOR = {
    "raw": parse("raw"),
    "window": Exact(1, 5),
    "turned": compose(Turned(), parse("raw")),
}


def cache_of(sequences: int) -> PolicyCache:
    """Give one that has read a prompt."""
    g = torch.Generator().manual_seed(3)
    made = PolicyCache(parse("raw"), SHAPE)
    made.begin(torch.ones(sequences, 5, dtype=torch.bool))
    for layer in range(SHAPE.layers):
        lead = sequences, SHAPE.kv_heads
        query = torch.randn(*lead, SHAPE.group, 5, SHAPE.key_dim, generator=g)
        key, value = (
            torch.randn(*lead, 5, dim, generator=g) for dim in (SHAPE.key_dim, SHAPE.value_dim)
        )
        made.attend(layer, query, key, value, 1.0)
    return made


def brought(tokens: int, g: torch.Generator) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Give queries, keys and values as vLLM does: views of one tensor with longer rows."""
    widths = QUERIES * SHAPE.key_dim, SHAPE.kv_heads * SHAPE.key_dim
    widths = (*widths, SHAPE.kv_heads * SHAPE.value_dim)
    whole = torch.randn(tokens, sum(widths), generator=g)
    heads = QUERIES, SHAPE.kv_heads, SHAPE.kv_heads
    each = zip(whole.split(widths, 1), heads, strict=True)
    return whole, tuple(x.unflatten(1, (n, -1)) for x, n in each)


def answers(
    policy: KVPolicy, *, used_again: bool, cache: PolicyCache | None = None
) -> list[Tensor]:
    """Read a prompt in two pieces and generate; what a layer was given may be gone after it."""
    cache, g = cache or PolicyCache(policy, SHAPE), torch.Generator().manual_seed(4)
    steps = [(9, True, True), (8, True, False), *([(1, False, False)] * 6)]
    found = []
    for tokens, prompt, more in steps:
        part = TokenRows.of(cache, torch.arange(tokens)[None], torch.device("cpu"))
        part.begin(prompt=prompt, remaining=int(more))
        for layer in range(SHAPE.layers):
            whole, three = brought(tokens, g)
            output = torch.empty(tokens, QUERIES, SHAPE.value_dim)
            part.attend(layer, *three, 0.5, output)
            found.append(output.clone())
            if used_again:
                whole.fill_(torch.nan)
                output.fill_(torch.nan)
    return found


@pytest.mark.parametrize("name", [*WITHOUT_SELECTOR, *POLICIES])
def test_the_memory_of_what_a_layer_was_given_may_be_used_again_at_once(name: str) -> None:
    policy = (WITHOUT_SELECTOR | POLICIES)[name]
    wanted, found = (answers(policy, used_again=again) for again in (False, True))
    for here, there in zip(found, wanted, strict=True):
        assert torch.equal(here, there)


def watched(cache: PolicyCache, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return what each call of the cache's `attend_rows` will have returned."""
    done: list[bool] = []
    in_rows = cache.attend_rows
    monkeypatch.setattr(
        cache, "attend_rows", lambda *given: done.append(in_rows(*given)) or done[-1]
    )
    return done


def expect_in_rows(
    policy: KVPolicy, ours: PolicyCache, other: PolicyCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Assert that one cache decodes in rows, and that both give the same answers."""
    done = watched(ours, monkeypatch)
    found, wanted = (answers(policy, used_again=True, cache=each) for each in (ours, other))
    for here, there in zip(found, wanted, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)
    assert done == [True] * 6 * SHAPE.layers


IN_ROWS = (
    Turned("4", "3"),
    Turned("6", "5", paired=True),
    Turned("6", "5", paired=True, shifted=True),
    Cut("4", "3"),
    Cut("6", "5"),
    Swapped("4", "3"),
    Swapped("6", "5", shifted=True),
    Turned("64", "3"),
    Turned("645", "2135"),
    Turned("26", "15", paired=True, shifted=True),
    Cut("514", "3"),
)


@pytest.mark.parametrize("more", ["raw", "snapkv:budget=9,window=4"])
@pytest.mark.parametrize("basis", IN_ROWS, ids=repr)
def test_coordinates_are_decoded_in_rows_as_otherwise(basis, more: str, monkeypatch) -> None:
    need("cpu")
    policy = compose(basis, parse(more))
    ours, other = (PolicyCache(policy, SHAPE, backend="cpu") for _ in range(2))
    assert ours._decode_rows is not None
    other._decode_rows = None
    expect_in_rows(policy, ours, other, monkeypatch)
    pairs = zip(*map(tensors, (ours, other)), strict=True)
    if isinstance(basis, Swapped):
        assert all(torch.equal(a, b) for a, b in pairs)
        return
    for mine, theirs in pairs:  # sums of products are rounded, in another order
        stored = mine.dtype == torch.uint8
        a, b = (x.view(torch.float32) if stored else x for x in (mine, theirs))
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("basis", [None, *IN_ROWS], ids=repr)
def test_queries_by_head_are_decoded_as_those_in_rows(basis, monkeypatch) -> None:
    need("cpu")
    policy = parse("raw") if basis is None else compose(basis, parse("raw"))
    ours, other = (PolicyCache(policy, SHAPE, backend="cpu") for _ in range(2))
    done = watched(ours, monkeypatch)
    g = torch.Generator().manual_seed(5)
    for tokens in (7, 1, 1, 1):
        valid = torch.ones(2, tokens, dtype=torch.bool)
        valid[1, 0] = tokens > 1 or len(done) < SHAPE.layers  # padding in the last steps
        ours.begin(valid)
        other.begin(valid)
        for layer in range(SHAPE.layers):
            lead = 2, SHAPE.kv_heads
            query = torch.randn(*lead, SHAPE.group, tokens, SHAPE.key_dim, generator=g)
            key, value = (
                torch.randn(*lead, tokens, dim, generator=g)
                for dim in (SHAPE.key_dim, SHAPE.value_dim)
            )
            found = ours.attend(layer, query, key, value, 0.5)
            by_token = [x[:, :, 0] for x in (key, value)]
            rows = torch.full((2, QUERIES, SHAPE.value_dim), torch.nan)
            given = query[:, :, :, 0].flatten(1, 2), *by_token, 0.5, rows, 0
            if tokens > 1:
                assert not other.attend_rows(layer, *given)
                other.attend(layer, query, key, value, 0.5)
                continue
            assert other.attend_rows(layer, *given)
            assert torch.equal(found[:, :, :, 0].flatten(1, 2), rows)
    assert done == [True] * 3 * SHAPE.layers
    assert all(torch.equal(a, b) for a, b in zip(*map(tensors, (ours, other)), strict=True))


@pytest.mark.parametrize("codes", ["k3v3", "k4v3:levels=normal", "k3v4:levels=normal"])
@pytest.mark.parametrize("more", ["", "snapkv:budget=9,window=4+"])
def test_codes_of_3_bits_and_of_levels_are_native(codes: str, more: str) -> None:
    need("cpu")
    policy = parse(more + codes)
    ours, other = (PolicyCache(policy, SHAPE, backend=name) for name in ("cpu", "torch"))
    assert ours._decode_rows is not None
    found, wanted = (answers(policy, used_again=True, cache=cache) for cache in (ours, other))
    for here, there in zip(found, wanted, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-3)
    wanted_tensors = other.state().tensors
    for key, x in ours.state().tensors.items():
        error = 1e-3 if "score" in key else 0.0  # sums of attention are rounded, bytes are not
        torch.testing.assert_close(x, wanted_tensors[key], rtol=error, atol=error, equal_nan=True)


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("ranks", [("4", "3"), ("43", "123")], ids=str)
@pytest.mark.parametrize("folded", [("keys",), ("values",), ("keys", "values")], ids=str)
def test_vectors_of_a_folded_model_are_decoded_in_rows(folded, ranks, cut, monkeypatch) -> None:
    """They are coordinates already, as is the output if values are."""
    need("cpu")
    caches = [
        PolicyCache(
            compose(Turned(*ranks), parse("raw")), SHAPE, backend=name, folded=frozenset(folded)
        )
        for name in ("cpu", "torch")
    ]
    done = watched(caches[0], monkeypatch)
    key_dim = 4 if "keys" in folded and cut else SHAPE.key_dim
    value_dim = 3 if "values" in folded else SHAPE.value_dim
    g = torch.Generator().manual_seed(6)
    for tokens in (7, 1, 1):
        for cache in caches:
            cache.begin(torch.ones(2, tokens, dtype=torch.bool))
        for layer in range(SHAPE.layers):
            lead = 2, SHAPE.kv_heads
            query = torch.randn(*lead, SHAPE.group, tokens, key_dim, generator=g)
            key = torch.randn(*lead, tokens, key_dim, generator=g)
            value = torch.randn(*lead, tokens, value_dim, generator=g)
            if "keys" in folded:
                query[..., 4:] = key[..., 4:] = 0  # a model's vectors keep their length
            found, wanted = (cache.attend(layer, query, key, value, 0.5) for cache in caches)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert done == [True] * 2 * SHAPE.layers


def tensors(cache: PolicyCache) -> list[Tensor]:
    return [x for _, x in sorted(cache.state().tensors.items())]


def test_heads_that_are_stored_together_are_not_decoded_in_rows() -> None:
    need("cpu")
    assert PolicyCache(Turned("9", "9", together=2), SHAPE, backend="cpu")._decode_rows is None


@pytest.mark.parametrize("window", [0, 5, 8])
def test_a_window_in_pages_is_decoded_in_rows_by_heads_of_other_ranks(window, monkeypatch) -> None:
    need("cpu")
    policy = compose(Turned("645", "2135"), Exact(1, window))
    size = PolicyCache(policy, SHAPE).layout.page_bytes
    ours, other = (
        PolicyCache(
            policy, SHAPE, backend=name, pool=PagePool(size, 400, kernels=page_kernels_of(name))
        )
        for name in ("cpu", "torch")
    )
    expect_in_rows(policy, ours, other, monkeypatch)


@settings(deadline=None, max_examples=40)
@given(data=st.data(), ordered=st.booleans(), extra=st.integers(0, 3), columns=st.integers(1, 3))
def test_rows_are_those_of_the_tokens_wherever_they_lie(data, ordered, extra, columns) -> None:
    sequences = 1 if columns > 1 else data.draw(st.integers(1, 5), label="sequences")
    count = sequences * columns
    rows = list(range(extra, extra + count))
    if not ordered:
        rows = data.draw(st.permutations(rows), label="rows")
        rows = [-1 if data.draw(st.booleans(), label="absent") else row for row in rows]
    row = torch.tensor(rows).view(sequences, columns)
    step, (query, key, value) = brought(extra + count + 1, torch.Generator().manual_seed(4))
    output = torch.full((len(step), QUERIES, SHAPE.value_dim), 7.0)

    ours, wanted = cache_of(sequences), cache_of(sequences)
    part = TokenRows.of(ours, row, torch.device("cpu"))
    part.begin(prompt=columns > 1)
    wanted.begin(row >= 0, prompt=columns > 1)
    for layer in range(SHAPE.layers):
        part.attend(layer, query, key, value, 1.0, output)
        at = row.clamp(min=0)
        q = query[at].unflatten(2, (SHAPE.kv_heads, -1)).permute(0, 2, 3, 1, 4)
        out = wanted.attend(layer, q, key[at].transpose(1, 2), value[at].transpose(1, 2), 1.0)
        for b, place in (row >= 0).nonzero().tolist():
            mine = output[row[b, place]].view(SHAPE.kv_heads, SHAPE.group, -1)
            assert torch.equal(mine, out[b, :, :, place])
    others = [i for i in range(len(step)) if i not in rows]
    assert (output[others] == 7).all()
