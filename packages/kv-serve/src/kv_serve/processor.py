"""Checks of torch on this processor: thread count and fast dtypes."""

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kv_serve.problem import Problem

QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")  # CPU limit of a container: microseconds per period
X86: Final = frozenset({"x86_64", "amd64"})
WITHOUT_BFLOAT16: Final = frozenset({"DEFAULT", "AVX2"})  # oneDNN needs AVX512 for fast bfloat16


@dataclass(frozen=True, slots=True)
class Threads:
    """Threads used by torch and cores available to this process."""

    torch: int
    omp_num_threads: str | None
    cores: int


def threads_used() -> Threads:
    """Return torch's thread count and the cores available."""
    import torch

    return Threads(torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS"), cores())


def cores() -> int:
    """Count the cores of this process: its CPU affinity, or fewer under a container's limit."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = bound or 1
    try:
        quota, period = QUOTA.read_text().split()
        return min(found, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no limit: the file is missing or contains `max`
        return found


def thread_problems(threads: Threads) -> Iterator[Problem]:
    """Yield a problem if torch uses more threads than cores."""
    if threads.torch > threads.cores:
        yield Problem(
            f"torch uses {threads.torch} threads on {threads.cores} cores, so they wait for each "
            "other",
            f"set OMP_NUM_THREADS={threads.cores}",
            broken=False,
        )


def bfloat16_problems() -> Iterator[Problem]:
    """Yield a problem if bfloat16 prefill is slow: an x86 processor without AVX512 or a GPU."""
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    if torch.cuda.is_available() or platform.machine().lower() not in X86:
        return
    if capability in WITHOUT_BFLOAT16:
        yield Problem(
            f"torch has no fast bfloat16 on this processor ({capability}), so models in bfloat16 "
            "have a slow prefill",
            "use --dtype float32, which doubles the memory of weights and of uncompressed tokens",
            broken=False,
        )
