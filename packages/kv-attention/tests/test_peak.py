"""Attention over some of the tokens, and the largest probabilities, against their definitions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_attention import (
    DenseTokens,
    Partial,
    Scored,
    attend,
    attend_and_score,
    attend_partly,
    largest_probabilities,
    peak,
)


def draw(seed: int, queries: int, tokens: int, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    q = 3 * torch.randn(2, 2, 3, queries, 8, generator=g, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, tokens, 8, generator=g, dtype=torch.float64)
    return q.to(dtype), key.to(dtype), value.to(dtype)


@given(st.integers(0, 99), st.integers(1, 9), st.integers(1, 12), st.integers(1, 200))
def test_the_largest_probability_is_that_of_the_whole_matrix(seed, queries, tokens, room) -> None:
    q, key, _ = draw(seed, queries, tokens)
    logits = q @ key[:, :, None].mT * 0.3
    # More tokens take a part of the probability; two queries do not count.
    lse = torch.logaddexp(logits.logsumexp(-1), torch.zeros(()).double())
    counts = torch.rand(lse.shape, generator=torch.Generator().manual_seed(seed)) < 0.8
    want = (logits - lse[..., None]).exp().where(counts[..., None], 0).amax((2, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peak, "_ROOM", room)  # blocks of a few tokens
        got = largest_probabilities(q, lse.where(counts, -torch.inf), key, 0.3)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_in_float32_for_other_dtypes(dtype) -> None:
    q, key, _ = draw(0, 5, 7, dtype)
    logits = q.float() @ key.float()[:, :, None].mT
    lse = logits.logsumexp(-1)
    got = largest_probabilities(q, lse, key, 1.0)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, (logits - lse[..., None]).exp().amax((2, 3)), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("lacking", [(), (0,), (0, 1)])
def test_parts_of_all_kinds_merge_to_the_whole(dtype, lacking) -> None:
    # Tokens before the queries, some sequences with none of them; new ones; and a mixture.
    q, key, value = draw(1, 6, 20, dtype)
    place = torch.arange(20).repeat(2, 1)
    place[0, 3], place[1, :2] = -1, -1
    first = place[:, :8].clone()
    first[list(lacking)] = -1
    position = place[:, 14:].clone()
    position[1, 4:] = -1
    fresh = place[:, 14:].where(position >= 0, -1)

    def tokens(at: slice, position) -> DenseTokens:
        return DenseTokens(key[:, :, at], value[:, :, at], position)

    parts = [
        tokens(slice(0, 8), first),
        tokens(slice(8, 14), place[:, 8:14]),
        tokens(slice(14, 20), fresh),
    ]
    want = attend(q, position, [], parts, 0.4, backend="reference").out
    a, b, c = (attend_partly(q, position, [], [part], 0.4) for part in parts)
    exact = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 0.02, "atol": 0.02}
    for got in (a + b + c, attend_partly(q, position, [], parts, 0.4)):
        torch.testing.assert_close(got.out.to(dtype), want, **exact)
    assert (a.lse[list(lacking)] == -torch.inf).all()
    assert (a.out[list(lacking)] == 0).all()
    assert (b.lse[1, ..., 4:] == -torch.inf).all()  # padding queries
    assert a.lse.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(
        attend(q, position, [], parts, 0.4, backend="torch").out, want, **exact
    )


def test_values_of_different_dimensions_are_refused() -> None:
    q, key, value = draw(2, 4, 4)
    place = torch.arange(4).expand(2, 4)
    parts = [DenseTokens(key, each, place) for each in (value, value[..., :3])]
    with pytest.raises(ValueError, match="values of the parts have 3, 8 dimensions"):
        attend_partly(q, place, [], parts, 1.0)


def chunk(dtype=torch.float64):
    """Return queries, their positions, and tokens: some before them, and their own."""
    q, key, value = draw(3, 6, 20, dtype)
    place = torch.arange(20).repeat(2, 1)
    place[0, :3] = place[1, 17:] = -1
    parts = [
        DenseTokens(key[:, :, a:b], value[:, :, a:b], place[:, a:b]) for a, b in ((0, 14), (14, 20))
    ]
    return q, place[:, 14:], parts


def test_a_pass_scores_its_first_parts() -> None:
    q, position, parts = chunk()
    found = attend_and_score(q, position, parts, 1, 0.4)
    whole = attend_partly(q, position, [], parts, 0.4)
    assert torch.equal(found.partial.out, whole.out)
    (most,) = found.largest
    want = largest_probabilities(q, whole.lse, parts[0].key, 0.4)
    assert torch.equal(most[1], want[1])
    assert torch.equal(most[0, :, 3:], want[0, :, 3:])
    assert not most[0, :, :3].any()  # empty slots
    assert attend_and_score(q, position, parts, 0, 0.4).largest == ()


def test_nothing_in_empty_slots_and_padding_is_scored() -> None:
    q, position, parts = chunk()
    want = attend_and_score(q, position, parts, 1, 0.4)
    q[1, :, :, 3:] = torch.nan
    parts[0].key[0, :, :3] = parts[0].value[0, :, :3] = torch.nan
    found = attend_and_score(q, position, parts, 1, 0.4)
    assert torch.equal(found.largest[0], want.largest[0])
    assert torch.equal(found.partial.out, want.partial.out)


def test_a_scored_token_after_a_query_is_refused() -> None:
    q, position, parts = chunk()
    with pytest.raises(ValueError, match=r"dense\[1\] is scored and has a token after a query"):
        attend_and_score(q, position, parts, 2, 0.4)


@pytest.mark.parametrize("declines", [False, True])
def test_a_backend_may_do_it_or_decline(monkeypatch, declines) -> None:
    q, position, parts = chunk()
    want = attend_and_score(q, position, parts, 1, 0.4)
    given = []

    def attend_own(inputs, scored):
        given.append(scored)
        return None if declines else Scored(Partial.empty(inputs.q, inputs.value_dim))

    monkeypatch.setattr(peak, "load_partial", {"own": attend_own}.__getitem__)
    found = attend_and_score(q, position, parts, 1, 0.4, backend="own")
    assert given == [1]
    if declines:
        assert torch.equal(found.largest[0], want.largest[0])
    else:
        assert found.largest == ()
    attend_partly(q, position, [], parts, 0.4, backend="own")
    assert given == [1, 0]


def test_an_unknown_backend_is_refused() -> None:
    q, position, parts = chunk()
    with pytest.raises(ValueError, match="unknown backend 'fast'; choose one of"):
        attend_and_score(q, position, parts, 1, 0.4, backend="fast")
