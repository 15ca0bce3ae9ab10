import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_attention import Partial

LEVEL = st.sampled_from([-math.inf, -800.0, -3.0, 0.0, 2.5, 800.0])


def partials(count):
    return st.lists(st.tuples(LEVEL, st.integers(0, 99)), min_size=count, max_size=count)


def make(level, seed):
    g = torch.Generator().manual_seed(seed)
    out = torch.randn(2, 2, 2, 3, 4, generator=g, dtype=torch.float64)
    lse = torch.randn(2, 2, 2, 3, generator=g, dtype=torch.float64) + level
    return Partial(out.masked_fill((lse == -math.inf)[..., None], 0), lse)


def close(a, b):
    torch.testing.assert_close(a.out, b.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(a.lse, b.lse, rtol=1e-12, atol=1e-12)


@given(partials(3))
def test_partials_are_a_commutative_monoid(drawn):
    a, b, c = (make(*x) for x in drawn)
    nothing = Partial.empty(torch.zeros(2, 2, 2, 3, 7, dtype=torch.float64), value_dim=4)
    close(a + (b + c), (a + b) + c)
    for x, y in ((a + b, b + a), (a + nothing, a), (nothing + a, a)):
        assert torch.equal(x.out, y.out)
        assert torch.equal(x.lse, y.lse)


@given(st.integers(0, 99), st.integers(0, 12))
def test_parts_add_up_to_the_whole(seed, cut):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 2, 3, 4, 12, generator=g, dtype=torch.float64) * 20
    value = torch.randn(1, 2, 1, 12, 5, generator=g, dtype=torch.float64)

    def part(at):
        x = logits[..., at]
        p = torch.nan_to_num(x.softmax(dim=-1))
        return Partial(p @ value[..., at, :], x.logsumexp(dim=-1))

    close(part(slice(cut)) + part(slice(cut, None)), part(slice(None)))


def test_adding_nothing_to_nothing_gives_nothing():
    nothing = Partial.empty(torch.zeros(1, 1, 1, 2, 3, dtype=torch.bfloat16), value_dim=6)
    both = nothing + nothing
    assert both.out.shape == (1, 1, 1, 2, 6)
    assert both.out.dtype == both.lse.dtype == torch.float32
    assert torch.equal(both.out, torch.zeros_like(both.out))
    assert (both.lse == -math.inf).all()


def test_only_real_queries_are_left():
    some = make(0.0, 1)
    some = Partial(some.out.clone().fill_(torch.nan), some.lse)
    real = torch.tensor([[True, False, True], [False, False, False]])
    left = some.only(real)
    gone = ~real[:, None, None].expand_as(left.lse)
    assert (left.out[gone] == 0).all()
    assert (left.lse[gone] == -math.inf).all()
    assert torch.equal(left.lse[~gone], some.lse[~gone])
