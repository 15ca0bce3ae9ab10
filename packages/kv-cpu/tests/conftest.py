"""Random paged caches for every test, and each instruction set in turn."""

import os
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest

from attention_cases import Case, random_case
from kv_cpu import compiled, runnable
from kv_cpu.library import FORCE

# Names, with commas between, of the instruction sets to test; those that run here of them are.
TESTED = os.environ.get("KV_CPU_TESTED", "")
SETS = [name for name in runnable() if not TESTED or name in TESTED.split(",")] or ["plain"]
# Where weights and queries are rounded to integers; others compute in float32.
ROUNDED = {"vnni": 1e-3, "amx": 1e-3, "amx-emulated": 1e-3}


def pytest_report_header() -> str:
    """Say which kernels are tested: some machines cannot run all of them."""
    rest = [name for name in compiled() if name not in runnable()]
    untested = f"; this machine cannot run {', '.join(rest)}" if rest else ""
    return f"kv-cpu: each test of kernels runs under {', '.join(SETS)}{untested}"


@pytest.fixture(scope="session")
def case() -> Callable[..., Case]:
    """The maker of random arguments for `attend`."""
    return random_case


@pytest.fixture(scope="module", params=SETS)
def near(request: pytest.FixtureRequest) -> Iterator[float]:
    """How far off an instruction set may be, while it is forced."""
    with patch.dict(os.environ, {FORCE: request.param}):
        yield ROUNDED.get(request.param, 2e-5)


# What VNNI adds is of no use where vectors are encoded: there it is AVX-512.
@pytest.fixture(scope="module", params=[name for name in SETS if name != "vnni"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that pages are written with, while it is forced."""
    with patch.dict(os.environ, {FORCE: request.param}):
        yield request.param
