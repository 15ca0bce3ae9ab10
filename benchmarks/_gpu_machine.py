"""What a GPU is, and what a copy moves on it."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import torch
from _gpu_child import Report
from gpu import Clock, copy_gbps

OPTIONAL: Final = (
    "triton",
    "transformers",
    "vllm",
    "flash-attn",
    "flash-attn-3",
    "flashinfer-python",
    "jaxtyping",
    "msgspec",
)
ASKED: Final = "driver_version,mig.mode.current,clocks.max.sm,clocks.max.memory,power.limit"


def machine(report: Report, case: str) -> None:
    """Write what is there; `case` is `versions` or `copy`."""
    if case == "versions":
        found: dict[str, object] = {"python": platform.python_version(), "torch": torch.__version__}
        for name in OPTIONAL:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = None
        report.add("versions", **found)
        if report.device == "cpu":
            return
        about = torch.cuda.get_device_properties(0)
        with report.trying("nvidia-smi"):
            command = ("nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader", "--id=0")
            said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
            names = ASKED.split(",")
            parts = [each.strip() for each in said.stdout.splitlines()[0].split(",")]
            report.add("driver", **dict(zip(names, parts, strict=False)))
        report.add(
            "card",
            name=about.name,
            capability=f"{about.major}.{about.minor}",
            multiprocessors=about.multi_processor_count,
            memory_gib=about.total_memory / 2**30,
            free_gib=torch.cuda.mem_get_info()[0] / 2**30,
            l2_mib=getattr(about, "L2_cache_size", 0) / 2**20,
            shared_bytes=getattr(about, "shared_memory_per_block_optin", None),
            mig="MIG" in about.name,
            cuda=torch.version.cuda,
            hip=torch.version.hip,
            cores=os.cpu_count(),
        )
        return
    gbps = copy_gbps(Clock(report.device), quick=report.quick)
    report.add("copy", gbps=gbps)
