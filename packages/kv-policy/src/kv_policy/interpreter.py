"""Whether Triton kernels can run on this machine, determined without importing triton."""

import os
from importlib.util import find_spec
from typing import Final

import torch

LEAST: Final = (8, 0)  # compute capability: bfloat16 products and asynchronous copies
SWITCH: Final = "TRITON_INTERPRET"  # set before the import of triton, it runs kernels without a GPU


def interpreted() -> bool:
    """Return whether Triton's interpreter is enabled; it runs kernels slowly on any device."""
    return os.environ.get(SWITCH, "").lower() in {"1", "true", "on", "yes", "y"}


def missing() -> str | None:
    """Return why Triton kernels cannot run here; None if they can.

    The age of GPUs is read only where the process uses them: asking for it would initialize CUDA,
    for example in a server's process that checks a configuration.
    """
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if interpreted():
        return None
    if not torch.cuda.is_available():
        return f"torch finds no GPU, and {SWITCH} is not set"
    if torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        found = max(torch.cuda.get_device_capability(i) for i in devices)
        if found < LEAST:
            return f"GPUs have at most compute capability {found[0]}.{found[1]}; kernels need 8.0"
    return None
