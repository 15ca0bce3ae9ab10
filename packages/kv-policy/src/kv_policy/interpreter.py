"""Whether Triton kernels can run on this machine, determined without importing triton."""

import os
from importlib.util import find_spec
from typing import Final

import torch

SWITCH: Final = "TRITON_INTERPRET"  # set before the import of triton, it runs kernels without a GPU


def interpreted() -> bool:
    """Return whether Triton's interpreter is enabled; it runs kernels slowly on any device."""
    return os.environ.get(SWITCH, "").lower() in {"1", "true", "on", "yes", "y"}


def missing() -> str | None:
    """Return why Triton kernels cannot run here; None if they can."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if not torch.cuda.is_available() and not interpreted():
        return f"torch finds no GPU, and {SWITCH} is not set"
    return None
