"""A fixture of random paged caches."""

import sys
from collections.abc import Callable

import pytest

from attention_cases import Case, random_case
from interpreted import interpret_without_gpu

interpret_without_gpu()

# Triton is only available for Linux.
of_triton = [
    "test_launches.py",
    "test_plan.py",
    "test_recompilation.py",
    "test_selecting.py",
    "test_triton.py",
    "test_widen.py",
]
collect_ignore = [] if sys.platform == "linux" else of_triton


@pytest.fixture(scope="session")
def case() -> Callable[..., Case]:
    """Return the function that draws random arguments for `attend`."""
    return random_case
