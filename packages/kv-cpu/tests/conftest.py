"""Random paged caches for every test, and each instruction set in turn."""

import os
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest

from attention_cases import Case, random_case
from kv_cpu import runnable
from kv_cpu.library import FORCE

# Where weights and queries are rounded to integers; others compute in float32.
ROUNDED = {"vnni": 1e-3}


@pytest.fixture(scope="session")
def case() -> Callable[..., Case]:
    """The maker of random arguments for `attend`."""
    return random_case


@pytest.fixture(scope="module", params=runnable())
def near(request: pytest.FixtureRequest) -> Iterator[float]:
    """How far off an instruction set may be, while it is forced."""
    with patch.dict(os.environ, {FORCE: request.param}):
        yield ROUNDED.get(request.param, 2e-5)
