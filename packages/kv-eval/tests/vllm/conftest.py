"""Tests that ask engines of vLLM."""

from pathlib import Path

import pytest

from vllm_models import skip_without_vllm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, where there is no vLLM."""
    skip_without_vllm(items, Path(__file__).parent)
