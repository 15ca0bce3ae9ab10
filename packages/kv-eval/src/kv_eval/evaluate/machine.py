"""The machine that a result was measured on."""

import os
import platform
from pathlib import Path


def machine() -> dict[str, str | int | float]:
    """Return the system, processor, cores, memory in GiB, and the GPU if there is one."""
    import torch

    found: dict[str, str | int | float] = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
    }
    if "SC_PHYS_PAGES" in os.sysconf_names:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found["memory_gib"] = round(size / 2**30, 1)
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _processor() -> str:
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())
