"""Instruction sets under test: all that the CPU supports, or those named in KV_CPU_TESTED."""

import os
from typing import Final

import torch

from kv_cpu import chosen, runnable

# Comma-separated names of the instruction sets to test, if available here.
TESTED: Final = os.environ.get("KV_CPU_TESTED", "")
SETS: Final = [x for x in runnable() if not TESTED or x in TESTED.split(",")] or ["plain"]
# Those whose prompts may multiply bfloat16 values in bfloat16.
NARROW: Final = ("vnni", "amx", "amx-emulated")
# Products of integers add nothing to AVX2 and AVX-512 for encoding; kernels for Arm add nothing to
# the plain ones.
PAGE_SETS: Final = [x for x in SETS if x not in ("avx-vnni", "vnni", "neon", "dotprod")] or [
    "plain"
]
# With AMX, prompts under VNNI use it; those under `dotprod` are those of NEON, and those under
# AVX-VNNI of AVX2.
SHARED_PROMPTS: Final = {"dotprod", "avx-vnni"} | ({"vnni"} if "amx" in runnable() else set())
PROMPT_SETS: Final = [x for x in SETS if x not in SHARED_PROMPTS] or ["plain"]


def kept_error(dtype: torch.dtype, power: int) -> float:
    """Return the relative error of sums of weights that prompts keep, in bfloat16 or float16."""
    narrow = dtype == torch.bfloat16 and chosen() in NARROW
    return power * (2**-8 if narrow else 2**-11)
