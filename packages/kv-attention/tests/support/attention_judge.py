"""Comparison of a backend with the float64 reference: the caches, and the tolerances."""

import torch
from hypothesis import strategies as st

from kv_policy import Observe

TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 2e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
FORMAT = st.sampled_from(["8", "4", "2", "1", "float16", "bfloat16", "float32", "float64"])
# Logits are about 1, so a bound of 1.5 changes most of them.
SOFTMAX = {"softcap": st.sampled_from([None, None, 1.5]), "sinks": st.booleans()}
SHAPES = st.fixed_dictionaries(
    {
        **SOFTMAX,
        "B": st.integers(1, 3),
        "H": st.integers(1, 3),
        "G": st.integers(1, 4),
        "L": st.sampled_from([1, 1, 2, 7, 33]),
        "D": st.sampled_from([1, 3, 8, 17]),
        "Dv": st.sampled_from([1, 3, 8, 17]),
        "group": st.sampled_from([2, 4, 128]),
        "stored": st.sampled_from([0, 1, 5, 19]),
        "page": st.sampled_from([1, 4, 7]),
        "spare": st.sampled_from([0, 3]),
        "window": st.sampled_from([0, 5]),
        "fresh": st.booleans(),
        "padding": st.sampled_from(["none", "left", "right", "all"]),
        "ragged": st.booleans(),
        "reverse": st.booleans(),
        "holes": st.booleans(),
        "known": st.booleans(),
        "dtype": st.sampled_from(list(TOLERANCE)),
    }
)


def assert_same_output(case, backend="torch", error=0.0):
    found = case.attend(backend=backend).out
    expected = case.attend(backend="reference").out
    assert found.dtype == case.q.dtype
    error = max(error, TOLERANCE[case.q.dtype])
    torch.testing.assert_close(found.double(), expected.double(), rtol=error, atol=error)


OBSERVE = st.builds(
    Observe,
    last=st.sampled_from([None, 1, 2, 5, 40]),
    group=st.sampled_from(["sum", "mean", "max", "max-of-sums"]),
    power=st.sampled_from([1, 2]),
    skip=st.sampled_from([0, 1, 4, 30]),
    also=st.frozensets(st.sampled_from(["squares", "entropy"])),
)
WATCHED_SHAPES = st.fixed_dictionaries(
    {
        **SOFTMAX,
        "B": st.integers(1, 3),
        "G": st.integers(1, 3),
        "L": st.sampled_from([1, 3, 20]),
        "group": st.sampled_from([2, 128]),
        "stored": st.sampled_from([0, 1, 19]),
        "window": st.sampled_from([0, 5]),
        "fresh": st.booleans(),
        "padding": st.sampled_from(["none", "left", "right", "all"]),
        "ragged": st.booleans(),
        "reverse": st.booleans(),
        "holes": st.booleans(),
        "known": st.booleans(),
    }
)


def assert_same_observation(case, observe, error=2e-5, backend="torch"):
    found = case.attend(observe, backend=backend)
    expected = case.attend(observe, backend="reference")
    parts = len(case.pages) + len(case.dense)
    assert len(found.mass) == len(found.seen) == len(expected.mass) == parts
    for got, wanted in zip(found.mass, expected.mass, strict=True):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=error, atol=error)
    for some, others in zip(found.also, expected.also, strict=True):
        assert len(some) == len(others) == len(observe.also)
        for got, wanted in ((some[name], others[name]) for name in observe.also):
            torch.testing.assert_close(got, wanted, rtol=error, atol=error)
    for got, wanted in zip(found.seen, expected.seen, strict=True):
        assert got.dtype == wanted.dtype == torch.int32
        assert torch.equal(got, wanted)
    return found
