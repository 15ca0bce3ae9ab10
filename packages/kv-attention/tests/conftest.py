"""Random paged caches for every test."""

import os
from collections.abc import Callable

import pytest
import torch

from attention_cases import Case, random_case

if not torch.cuda.is_available():  # asked by triton when it is imported
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def case() -> Callable[..., Case]:
    """The maker of random arguments for `attend`."""
    return random_case
