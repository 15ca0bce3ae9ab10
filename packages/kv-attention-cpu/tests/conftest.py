"""Random paged caches for every test."""

from collections.abc import Callable

import pytest

from attention_cases import Case, random_case


@pytest.fixture(scope="session")
def case() -> Callable[..., Case]:
    """The maker of random arguments for `attend`."""
    return random_case
