"""Fixtures: random paged caches, and each instruction set in turn."""

import os
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest

from attention_cases import Case, random_case
from kv_cpu import compiled, runnable
from kv_cpu.library import FORCE
from native_sets import PAGE_SETS, SETS

# These round weights and queries to integers; others compute in float32.
ROUNDED = {"avx2", "avx-vnni", "avx512", "vnni", "dotprod", "amx", "amx-emulated"}


def pytest_report_header() -> str:
    """Return which kernels are tested: some machines cannot run all of them."""
    rest = [name for name in compiled() if name not in runnable()]
    untested = f"; this machine cannot run {', '.join(rest)}" if rest else ""
    return f"kv-cpu: each test of kernels runs under {', '.join(SETS)}{untested}"


@pytest.fixture(scope="session")
def case() -> Callable[..., Case]:
    """Return the function that draws random arguments for `attend`."""
    return random_case


@pytest.fixture(scope="module", params=SETS)
def near(request: pytest.FixtureRequest) -> Iterator[float]:
    """Force each instruction set, and return its tolerance."""
    with patch.dict(os.environ, {FORCE: request.param}):
        yield 1e-3 if request.param in ROUNDED else 2e-5


@pytest.fixture(scope="module", params=PAGE_SETS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Force each instruction set with its own page kernels."""
    with patch.dict(os.environ, {FORCE: request.param}):
        yield request.param
