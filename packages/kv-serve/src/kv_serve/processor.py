"""How well torch uses this processor: its threads, and the numbers it multiplies quickly."""

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kv_serve.problem import Problem

QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds in each period
X86: Final = frozenset({"x86_64", "amd64"})
WITHOUT_BFLOAT16: Final = frozenset({"DEFAULT", "AVX2"})  # oneDNN multiplies it from AVX512 on


@dataclass(frozen=True, slots=True)
class Threads:
    """How many threads torch uses, and how many cores this process may use."""

    torch: int
    omp_num_threads: str | None
    cores: int


def threads_used() -> Threads:
    """Look at what torch uses, and at what there is."""
    import torch

    return Threads(torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS"), cores())


def cores() -> int:
    """Cores that this process may use: those it is bound to, or fewer where a container says so."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = bound or 1
    try:
        quota, period = QUOTA.read_text().split()
        return min(found, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no such limit: no file, or `max` in it
        return found


def thread_problems(threads: Threads) -> Iterator[Problem]:
    """Say where threads wait for one another."""
    if threads.torch > threads.cores:
        yield Problem(
            f"torch uses {threads.torch} threads on {threads.cores} cores, so they wait for each "
            "other",
            f"set OMP_NUM_THREADS={threads.cores}",
            broken=False,
        )


def bfloat16_problems() -> Iterator[Problem]:
    """Say where models in bfloat16 read prompts slowly, as no GPU and no AVX512 is there."""
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    if torch.cuda.is_available() or platform.machine().lower() not in X86:
        return
    if capability in WITHOUT_BFLOAT16:
        yield Problem(
            f"torch has no fast bfloat16 on this processor ({capability}), so models in bfloat16 "
            "read prompts slowly",
            "--dtype float32, for twice the memory of weights and of what is not compressed",
            broken=False,
        )
