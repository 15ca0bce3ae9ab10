"""The largest probabilities of a native pass, against float64, for each instruction set."""

import os
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_cases import random_case
from kv_attention import AttentionInputs, DenseTokens, attend_and_score, peak
from kv_cpu import runnable
from kv_cpu.library import FORCE
from kv_cpu.plugin import BACKEND
from kv_cpu.prompt import attend_and_score as native
from native_sets import PROMPT_SETS

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EXACT = {"rtol": 2e-4, "atol": 1e-6}


@pytest.fixture(scope="module", params=PROMPT_SETS)
def isa(request):
    """Force each instruction set."""
    with patch.dict(os.environ, {FORCE: request.param}):
        yield request.param


@dataclass(frozen=True)
class Chunk:
    """Queries over tokens before them, which are scored, and over each other."""

    q: Tensor
    position: Tensor
    scored: list[DenseTokens]
    own: DenseTokens
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def inputs(self) -> AttentionInputs:
        dense = [*self.scored, self.own]
        dim = self.own.value.shape[-1]
        softmax = {"softcap": self.softcap, "sinks": self.sinks}
        return AttentionInputs(self.q, self.position, [], dense, [], dim, self.scale, **softmax)

    @property
    def largest(self) -> list[Tensor]:
        """Return what is expected, by plain matrices in float64."""
        parts = [*self.scored, self.own]
        logits = []
        for part in parts:
            x = self.q.double() @ part.key.double()[:, :, None].mT * self.scale
            if self.softcap is not None:
                x = self.softcap * (x / self.softcap).tanh()
            place, query = part.position[:, None], self.position[:, :, None]
            sees = (place >= 0) & (place <= query)
            logits.append(x.masked_fill(~sees[:, None, None], -torch.inf))
        column = torch.full_like(logits[0][..., :1], -torch.inf)
        if self.sinks is not None:
            column[:] = self.sinks[:, :, None, None]
        lse = torch.cat([*logits, column], -1).logsumexp(-1, keepdim=True)
        shares = [(x - lse.masked_fill(lse == -torch.inf, 0)).exp() for x in logits]
        return [x.amax((2, 3)) for x in shares[: len(self.scored)]]


def draw(
    seed=0, batch=2, heads=2, group=3, queries=37, tokens=(41,), dim=64, dtype=torch.float32
) -> Chunk:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dim, generator=g).to(dtype)

    def padded(first: int, count: int) -> Tensor:
        place = torch.arange(first, first + count).repeat(batch, 1)
        return place.where(torch.rand(batch, count, generator=g) < 0.9, -1)

    parts, at = [], 0
    for count in tokens:
        vectors = normal(batch, heads, count), normal(batch, heads, count)
        parts.append(DenseTokens(*vectors, padded(at, count)))
        at += count
    position = padded(at, queries)
    vectors = normal(batch, heads, queries), normal(batch, heads, queries)
    own = DenseTokens(*vectors, position)
    return Chunk(2 * normal(batch, heads, group, queries), position, parts, own, dim**-0.5)


def largest(chunk: Chunk, threads: int) -> tuple[Tensor, ...]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return native(chunk.inputs, len(chunk.scored)).largest
    finally:
        torch.set_num_threads(before)


def expect(chunk: Chunk) -> tuple[Tensor, ...]:
    found = largest(chunk, 1)
    for got, want in zip(found, chunk.largest, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, **EXACT)
    return found


@settings(max_examples=30)
@given(
    st.integers(0, 99),
    st.integers(1, 8),
    st.sampled_from([1, 9, 12, 13, 50]),
    st.lists(st.sampled_from([1, 31, 33, 257, 300]), min_size=1, max_size=2),
    st.sampled_from([1, 7, 16, 33]),
    st.sampled_from(DTYPES),
    st.sampled_from([None, 1.5]),
    st.booleans(),
)
def test_any_chunk(isa, seed, group, queries, tokens, dim, dtype, softcap, sinks) -> None:
    chunk = draw(seed, group=group, queries=queries, tokens=tokens, dim=dim, dtype=dtype)
    drawn = 2 + torch.randn(chunk.q.shape[1:3], generator=torch.Generator().manual_seed(seed))
    expect(replace(chunk, softcap=softcap, sinks=drawn if sinks else None))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.grid(3)
def test_heads_of_models(isa, dtype, dim, group) -> None:
    expect(draw(1, batch=1, group=group, dim=dim, dtype=dtype, tokens=(270,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_in_any_number_of_threads_and_tasks(isa, dtype) -> None:
    # One thread has two tasks for each head, as so many tokens are scored, and more have more.
    chunk = draw(2, queries=130, tokens=(3000, 5), dim=16, dtype=dtype)
    one = expect(chunk)
    for threads in (2, 5):
        for a, b in zip(one, largest(chunk, threads), strict=True):
            assert torch.equal(a, b)


def test_the_output_is_that_of_a_pass_without_scores(isa) -> None:
    chunk = draw(3, queries=70, tokens=(400,), dtype=torch.bfloat16)
    scored, plain = native(chunk.inputs, 1).partial, native(chunk.inputs, 0)
    assert torch.equal(scored.out, plain.partial.out)
    assert torch.equal(scored.lse, plain.partial.lse)
    assert plain.largest == ()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_in_empty_slots_and_padding_has_an_effect(isa, dtype) -> None:
    chunk = draw(4, tokens=(300,), dtype=dtype)
    want = expect(chunk)

    def spoilt(part: DenseTokens) -> DenseTokens:
        empty = (part.position < 0)[:, None, :, None]
        return replace(
            part,
            key=part.key.masked_fill(empty, torch.nan),
            value=part.value.masked_fill(empty, torch.nan),
        )

    padding = (chunk.position < 0)[:, None, None, :, None]
    nan = replace(
        chunk,
        q=chunk.q.masked_fill(padding, torch.nan),
        scored=[spoilt(part) for part in chunk.scored],
        own=spoilt(chunk.own),
    )
    found = native(nan.inputs, 1)
    assert torch.equal(found.largest[0], want[0])
    assert not found.partial.out.isnan().any()
    (most,) = peak.attend_and_score(
        nan.q, nan.position, [*nan.scored, nan.own], 1, nan.scale
    ).largest
    torch.testing.assert_close(most, want[0], rtol=2e-2, atol=1e-3)


def test_queries_that_see_nothing_do_not_count(isa) -> None:
    chunk = draw(5)
    for part in (*chunk.scored, chunk.own):
        part.position[0] = -1
    chunk.position[0] = torch.arange(100, 137)  # of the first sequence: they see no token
    assert not expect(chunk)[0][0].any()
    chunk = draw(5, tokens=(40, 20))
    chunk.scored[0].position[1] = -1
    assert not expect(chunk)[0][1].any()


def test_a_number_that_is_nan_is_not_hidden(isa) -> None:
    chunk = draw(6)
    chunk.q[0, 0, 0, 30] = torch.nan
    assert chunk.position[0, 30] >= 0
    (found,) = native(chunk.inputs, 1).largest
    held = chunk.scored[0].position[0] >= 0
    assert found[0, 0, held].isnan().all()
    assert not found[0, 1].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_backend_scores_without_torch(dtype) -> None:
    chunk = draw(7, dtype=dtype)
    given = chunk.q, chunk.position, [*chunk.scored, chunk.own], 1, chunk.scale
    want = attend_and_score(*given)
    with patch("kv_attention.peak.partial_of", side_effect=AssertionError("torch attended")):
        found = attend_and_score(*given, backend=BACKEND.name)
    assert torch.equal(found.partial.lse, native(chunk.inputs, 1).partial.lse)
    error = 2e-5 if dtype == torch.float32 else 2e-2  # torch rounds its log-sum-exp in 16 bits
    torch.testing.assert_close(found.largest, want.largest, rtol=error, atol=1e-6)
    torch.testing.assert_close(
        found.partial.out, want.partial.out.to(dtype), rtol=error, atol=error
    )


@pytest.mark.parametrize(
    ("change", "name"),
    [({"queries": 8}, "vnni"), ({"dtype": torch.float64}, "vnni"), ({}, "plain")],
)
def test_torch_scores_what_is_declined(change, name) -> None:
    chunk = draw(8, **change)
    given = chunk.q, chunk.position, [*chunk.scored, chunk.own], 1, chunk.scale
    with patch.dict(os.environ, {FORCE: name if name in runnable() else runnable()[-1]}):
        (found,) = attend_and_score(*given, backend=BACKEND.name).largest
    assert torch.equal(found, attend_and_score(*given).largest[0])


def test_only_parts_that_are_dense_are_scored() -> None:
    c = random_case(9, L=20, tiers=[("8", "4")], window=4)
    with pytest.raises(RuntimeError, match=r"^part 0 is in pages; only dense tensors of tokens"):
        native(c.inputs(), 1)
    inputs = draw(9).inputs
    with pytest.raises(RuntimeError, match=r"^scored is 3; it must be 0 to 2"):
        native(inputs, 3)
