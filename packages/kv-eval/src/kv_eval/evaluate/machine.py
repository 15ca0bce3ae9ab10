"""The machine that a result was measured on."""

import os
import platform
from pathlib import Path

# Instruction sets that kernels choose between, as Linux names them.
EXTENSIONS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "amx_tile",
    "asimd",
    "asimddp",
    "i8mm",
    "sve",
)


def machine() -> dict[str, str | int | float]:
    """Return the system, processor, its instruction sets, cores, memory in GiB, and the GPU if any.

    Processors of one name differ, as those of virtual machines do: `instructions`, where Linux says
    them, are what tells them apart.
    """
    import torch

    said = _said()
    found: dict[str, str | int | float] = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": said.get("model name") or platform.processor(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
    }
    flags = (said.get("flags") or said.get("Features", "")).split()
    if instructions := [each for each in EXTENSIONS if each in flags]:
        found["instructions"] = " ".join(instructions)
    if "cpu family" in said:
        found["model"] = f"family {said['cpu family']}, model {said.get('model', '')}"
    if "SC_PHYS_PAGES" in os.sysconf_names:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found["memory_gib"] = round(size / 2**30, 1)
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _said() -> dict[str, str]:
    """What Linux says of the first core."""
    described = Path("/proc/cpuinfo")
    first = described.read_text().partition("\n\n")[0] if described.exists() else ""
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
