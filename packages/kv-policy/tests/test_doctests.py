"""The examples in the docstrings are true."""

import doctest
import importlib
import pkgutil

import pytest

import kv_policy

MODULES = [m.name for m in pkgutil.walk_packages(kv_policy.__path__, "kv_policy.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples() -> None:
    results = (doctest.testmod(importlib.import_module(name)) for name in MODULES)
    assert sum(result.attempted for result in results) >= 5
