"""Many queries in native code against the oracle, for each instruction set that runs here."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_judge import SHAPES, TOLERANCE
from kv_attention import torch_backend
from kv_cpu import prompt
from kv_cpu.few import MOST

NAMES = st.sampled_from(["8", "4", "2", "1", "float16", "bfloat16", "float32"])
TIERS = st.lists(st.tuples(NAMES, NAMES), max_size=3)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LENGTHS = st.sampled_from([MOST + 1, 31, 33, 70])


def native(c, threads=1):
    """Attend natively; `plain` is asked too, though torch is faster than it."""
    value_dim = c.attend().out.shape[-1]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return prompt.attend_to_all(c.q, c.position, c.pages, c.dense, value_dim, c.scale)
    finally:
        torch.set_num_threads(before)


def exact_lse(c):
    """The log-sum-exp of each query in float64."""
    q = replace(c, q=c.q.double())
    done = torch_backend.forward(
        q.q, c.position, c.pages, c.dense, c.attend().out.shape[-1], c.scale, c.page_positions
    )
    return done.lse


def assert_native(c, threads=1):
    found = native(c, threads)
    expected = c.attend(backend="reference").out
    assert found.out.dtype == c.q.dtype
    error = TOLERANCE[c.q.dtype]
    torch.testing.assert_close(found.out.double(), expected.double(), rtol=error, atol=error)
    torch.testing.assert_close(found.lse.double(), exact_lse(c), rtol=1e-5, atol=1e-5)
    return found


@settings(max_examples=80)
@given(st.integers(0, 99), SHAPES, LENGTHS, st.sampled_from(DTYPES), TIERS)
def test_any_prompt(case, near, seed, shape, length, dtype, tiers):
    assert_native(case(seed, tiers=tiers, **shape | {"L": length, "dtype": dtype}))
