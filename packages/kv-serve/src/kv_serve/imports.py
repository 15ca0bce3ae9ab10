"""Test imports of the libraries that a model needs, each in its own process."""

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from typing import Final

LIBRARIES: Final = {
    "torch": "import torch",
    # The package imports its parts lazily, so import what every model needs.
    "transformers": "from transformers import AutoModelForCausalLM, LlamaForCausalLM",
    "torchvision": "import torchvision",
    "triton": "import triton",
    "vllm": "from vllm import LLM",
}
PATIENCE: Final = 300  # seconds


@dataclass(frozen=True, slots=True)
class Import:
    """An installed library and its import error, if any."""

    name: str
    distribution: str
    version: str
    error: str | None


def try_imports(names: Iterable[str] = tuple(LIBRARIES)) -> tuple[Import, ...]:
    """Import the installed ones of the libraries, in parallel.

    Each import has its own process, since it may end the process and cannot be undone.
    """
    owners = packages_distributions()
    found = [name for name in names if find_spec(name) is not None]
    running = [
        subprocess.Popen(
            (sys.executable, "-c", LIBRARIES[name]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in found
    ]
    errors = [_error(process) for process in running]
    return tuple(
        Import(name, *_version(name, owners.get(name, [name])), error)
        for name, error in zip(found, errors, strict=True)
    )


def _error(process: "subprocess.Popen[str]") -> str | None:
    try:
        _, said = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"its import takes longer than {PATIENCE} seconds"
    if process.returncode == 0:
        return None
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else f"its process exited with status {process.returncode}"


def _version(name: str, distributions: list[str]) -> tuple[str, str]:
    for distribution in distributions:
        try:
            return distribution, version(distribution)
        except PackageNotFoundError:
            continue
    return name, "of unknown version"
