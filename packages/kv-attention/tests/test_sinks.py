"""Sinks and the bound of logits, against the laws that define them."""

from dataclasses import replace
from typing import Any

import jaxtyping
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attention_cases import Case, random_case
from attention_judge import SHAPES, TOLERANCE, assert_same_observation, assert_same_output
from kv_attention import DenseTokens, Partial, attend, attend_and_score, attend_partly
from kv_policy import Observe

EXACT: dict[str, Any] = {"dtype": torch.float64, "known": False}
BACKENDS = ["reference", "torch"]


def lse_of(c: Case) -> Tensor:
    """Return the log-sum-exp of each query's logits over dense tokens, from plain matrices."""
    key = torch.cat([d.key for d in c.dense], 2)
    place = torch.cat([d.position for d in c.dense], 1)[:, None, None, None]
    x = c.q @ key[:, :, None].mT * c.scale
    if c.softcap is not None:
        x = c.softcap * (x / c.softcap).tanh()
    seen = (place >= 0) & (place <= c.position[:, None, None, :, None])
    return x.masked_fill(~seen, -torch.inf).logsumexp(-1)


@given(seed=st.integers(0, 99), shape=SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_multiplies_attention_by_the_sigmoid_of_what_it_is_below_the_tokens(
    backend: str, seed: int, shape: dict[str, Any]
) -> None:
    given = shape | EXACT | {"sinks": True, "fresh": True}
    c = random_case(seed, tiers=(), **given)
    plain = replace(c, sinks=None)
    share = (lse_of(c) - c.sinks[:, :, None]).sigmoid()
    real = (c.position >= 0)[:, None, None]
    share = share.where(real, 0)
    watch = Observe(None, "sum")
    found, bare = c.attend(watch, backend), plain.attend(watch, backend)
    torch.testing.assert_close(found.out, bare.out * share[..., None], rtol=1e-9, atol=1e-12)
    total = torch.cat(found.mass, -1).sum(-1)
    torch.testing.assert_close(total, share.sum((2, 3)), rtol=1e-9, atol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(found.seen, bare.seen, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_is_a_token_with_value_zero_and_that_logit(backend: str) -> None:
    """As a row that a query of ones beyond the dimensions of keys picks out."""
    c = random_case(1, L=9, G=1, H=3, window=4, padding="left", tiers=(), sinks=True, **EXACT)
    as_token = torch.zeros(2, 3, 1, 6, dtype=torch.float64)
    as_token[..., 5] = c.sinks.view(1, 3, 1) / c.scale
    wide = torch.nn.functional.pad(c.q, (0, 1), value=1)
    dense = [
        DenseTokens(torch.nn.functional.pad(d.key, (0, 1)), d.value, d.position) for d in c.dense
    ]
    sink = DenseTokens(as_token, torch.zeros_like(as_token[..., :5]), torch.zeros(2, 1).long())
    other = Case(wide, c.position, [], [*dense, sink], [], c.scale)
    found, want = (x.attend(Observe(None), backend) for x in (c, other))
    torch.testing.assert_close(found.out, want.out, rtol=1e-11, atol=1e-12)
    for mine, theirs in zip(found.mass, want.mass, strict=False):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("observe", [Observe(None), Observe(None, gumbel=0.7)], ids=str)
def test_very_low_sinks_and_a_very_high_bound_change_nothing(
    backend: str, observe: Observe
) -> None:
    c = random_case(2, L=7, window=4, padding="right", **EXACT)
    free = replace(c, softcap=1e7, sinks=torch.full((2, 2), -200.0, dtype=torch.float64))
    found, want = (x.attend(observe, backend) for x in (free, c))
    torch.testing.assert_close(found.out, want.out, rtol=1e-9, atol=1e-9)
    for mine, theirs in zip(found.mass, want.mass, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_without_tokens_gives_its_sink_everything(backend: str) -> None:
    c = random_case(3, L=2, sinks=True, stored=0, fresh=False, dtype=torch.float64)
    assert not c.attend(backend=backend).out.any()
    q = c.q.nan_to_num()
    found = attend_partly(q, c.position, [], [], 1.0, backend, sinks=c.sinks)
    torch.testing.assert_close(found.lse, c.sinks[None, :, :, None].expand_as(found.lse))
    assert not found.out.any()


@given(st.integers(0, 99), st.floats(-30, 30))
def test_a_partial_with_sinks_is_its_sum_with_a_partial_of_that_log_sum_exp(seed, level) -> None:
    g = torch.Generator().manual_seed(seed)
    out = torch.randn(2, 3, 2, 4, 5, generator=g, dtype=torch.float64)
    lse = torch.randn(2, 3, 2, 4, generator=g, dtype=torch.float64)
    lse[0, 0], out[0, 0] = -torch.inf, 0
    sinks = torch.randn(3, 2, generator=g, dtype=torch.float64) + level
    of_sinks = Partial(torch.zeros_like(out), sinks[..., None].expand_as(lse))
    for found, want in (
        (Partial(out, lse).with_sinks(sinks), Partial(out, lse) + of_sinks),
        (Partial(out, lse).with_sinks(sinks - torch.inf), Partial(out, lse)),
    ):
        torch.testing.assert_close(found.out, want.out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.lse, want.lse, rtol=1e-12, atol=1e-12)


CAPS = [(None, True), (1.5, False), (1.5, True)]


@pytest.mark.parametrize(("softcap", "sinks"), CAPS)
@pytest.mark.parametrize("dims", [(512, 512), (576, 512), (192, 128), (257, 65)], ids=str)
@pytest.mark.parametrize("L", [1, 40])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_dimensions_of_large_heads(dims, L, dtype, softcap, sinks) -> None:
    D, Dv = dims
    tiers = [("8", "4"), ("bfloat16", "bfloat16")]
    shape: dict[str, Any] = {"D": D, "Dv": Dv, "L": L, "stored": 9, "scale": 3 * D**-0.5}
    c = random_case(4, tiers=tiers, window=3, softcap=softcap, sinks=sinks, dtype=dtype, **shape)
    assert_same_output(c, error=4e-5 if dtype == torch.float32 else 0)
    if dtype == torch.float32:
        assert_same_observation(c, Observe(5, skip=1), error=1e-4)


@pytest.mark.parametrize(("softcap", "sinks"), CAPS)
@pytest.mark.parametrize("group", ["sum", "mean", "max", "max-of-sums"])
def test_every_observation(softcap, sinks, group) -> None:
    shape: dict[str, Any] = {"B": 3, "L": 9, "G": 3, "padding": "left", "window": 4}
    c = random_case(5, softcap=softcap, sinks=sinks, **shape, **EXACT)
    for observe in (
        Observe(5, group, above=0.5),
        Observe(None, group, power=2, skip=2, also=frozenset({"entropy", "squares"})),
        Observe(4, group, gumbel=0.7),
    ):
        assert_same_observation(c, observe, error=1e-10)


@given(seed=st.integers(0, 99), softcap=st.sampled_from([None, 2.0]))
def test_the_largest_probability_counts_the_sink_and_the_bound(seed, softcap) -> None:
    g = torch.Generator().manual_seed(seed)
    q = 3 * torch.randn(2, 2, 3, 5, 8, generator=g, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 14, 8, generator=g, dtype=torch.float64)
    sinks = torch.randn(2, 3, generator=g, dtype=torch.float64) + 2
    place = torch.arange(14).repeat(2, 1)
    place[0, :3] = -1
    position = torch.arange(14, 19).repeat(2, 1)
    position[1, 3:] = -1
    parts = [
        DenseTokens(key[:, :, at], value[:, :, at], place[:, at])
        for at in (slice(0, 9), slice(9, 14))
    ]
    found = attend_and_score(q, position, parts, 1, 0.4, "torch", softcap, sinks)
    x = q @ key[:, :, None].mT * 0.4
    x = x if softcap is None else softcap * (x / softcap).tanh()
    x = x.masked_fill((place < 0)[:, None, None, None], -torch.inf)
    column = sinks[None, :, :, None, None].expand(*x.shape[:-1], 1)
    p = torch.cat((x, column), -1).softmax(-1)[..., :-1]
    p = p.masked_fill((position < 0)[:, None, None, :, None], 0)
    torch.testing.assert_close(found.largest[0], p[..., :9].amax((2, 3)))
    torch.testing.assert_close(found.partial.out, p @ value[:, :, None])
    # Sinks of one part of the tokens are those of all of them.
    rest = attend_partly(q, position, [], parts[1:], 0.4, softcap=softcap)
    whole = attend_partly(q, position, [], parts[:1], 0.4, softcap=softcap, sinks=sinks) + rest
    torch.testing.assert_close(whole.out, found.partial.out)
    torch.testing.assert_close(whole.lse, found.partial.lse)


@pytest.mark.parametrize("softcap", [0.0, -1.0, float("inf"), float("nan")])
def test_a_bound_that_is_no_positive_number_is_refused(softcap: float) -> None:
    c = random_case(6, L=2)
    with pytest.raises(ValueError, match=r"softcap is .*; give a positive number"):
        replace(c, softcap=softcap).attend()


def test_sinks_of_other_heads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    c = random_case(6, H=3, G=2)
    for sinks in (torch.zeros(2, 3), torch.zeros(3, 2, 1), torch.zeros(3, 2).long()):
        with pytest.raises(ValueError, match=r"shape \[KV heads, group\], here \(3, 2\)"):
            replace(c, sinks=sinks).attend()
    with pytest.raises(ValueError, match="sinks are"):
        attend(c.q, c.position, [], c.dense, 1.0, sinks=torch.zeros(6))
