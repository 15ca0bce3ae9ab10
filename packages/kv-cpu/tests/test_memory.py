"""Decode steps, prompts and scores free all of their memory, by the allocator's statistics."""

import ctypes
import gc
from collections.abc import Callable

import pytest

from attention_cases import Case
from gate_cases import gate_of, rope_of, view_of
from kv_cpu.prompt import attend_to_all
from kv_policy import CacheShape, Observe

TIMES = 500
LEAK = 16  # bytes per call: the smallest allocation
ALLOWED = TIMES * LEAK // 2


class Mallinfo2(ctypes.Structure):
    """glibc's statistics of its heap."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@pytest.fixture(scope="module")
def libc() -> ctypes.CDLL:
    """Return the C library, if it counts allocated bytes."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("this C library has no mallinfo2")
    libc.mallinfo2.restype = Mallinfo2
    libc.malloc.restype = ctypes.c_void_p
    if taken(libc) == 0:
        pytest.skip("another allocator stands in for the C library's, such as a sanitizer's")
    return libc


def taken(libc: ctypes.CDLL) -> int:
    """Return the bytes in use, including mapped ones."""
    gc.collect()
    found = libc.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def growth(libc: ctypes.CDLL, call: Callable[[], object]) -> int:
    for _ in range(50):  # one-time allocations
        call()
    before = taken(libc)
    for _ in range(TIMES):
        call()
    return taken(libc) - before


def test_steps_leak_nothing(near: float, case: Callable[..., Case], libc: ctypes.CDLL) -> None:
    c = case(5, L=1, D=32, Dv=32, stored=40, page=16, window=4, tiers=[("8", "4"), ("4", "2")])
    watch, more = Observe(last=1, group="max"), [Observe(last=1, also=frozenset({"squares"}))]
    assert growth(libc, lambda: c.attend(watch, "cpu", more)) < ALLOWED


def test_prompts_leak_nothing(near: float, case: Callable[..., Case], libc: ctypes.CDLL) -> None:
    c = case(7, L=12, D=32, Dv=32, stored=40, page=16, window=4, tiers=[("8", "4"), ("4", "2")])
    inputs = c.inputs()
    assert growth(libc, lambda: attend_to_all(inputs)) < ALLOWED


def test_token_scores_leak_nothing(libc: ctypes.CDLL) -> None:
    shape = CacheShape(2, 2, 1, 16, 16, rope=rope_of(16))
    gate, view = gate_of(shape, 17), view_of(shape, [1, 0], 200)
    assert growth(libc, lambda: gate.score(view)) < ALLOWED


def test_calls_that_fail_leak_nothing(case: Callable[..., Case], libc: ctypes.CDLL) -> None:
    c = case(6, L=1, stored=40)
    c.pages[0].length[0, 0] = -1

    def failing() -> None:
        with pytest.raises(RuntimeError, match="a table row has -1 tokens"):
            c.attend(backend="cpu")

    assert growth(libc, failing) < ALLOWED


def test_a_leak_would_be_seen(libc: ctypes.CDLL) -> None:
    assert growth(libc, lambda: libc.malloc(LEAK)) > ALLOWED
