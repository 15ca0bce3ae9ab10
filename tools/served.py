"""Versions of vLLM: those that tests run in, and what the reports of sessions say of each.

`nox -s vllm -- all` leaves reports of tests, and `nox -s upstream -- VERSION` one of a comparison.
"""

import json
from pathlib import Path
from typing import Final

from packaging.version import InvalidVersion, Version

from tools.count import count
from tools.workspace import ROOT

# A build of each minor version that is served, of those that the index has for CPUs; newest first.
VLLM: Final = ("0.32.0", "0.31.0", "0.30.0", "0.29.0")
REPORTS: Final = ROOT / ".nox" / ".cache" / "reports"
TESTED: Final = "vllm-at-"  # begins the name of a report, which ends with the version
COMPARED: Final = "upstream-"


def versions(start: str, suffix: str, reports: Path) -> dict[str, Path]:
    """Return the reports whose names have a version after their start, oldest version first."""
    found = {}
    for path in reports.glob(f"{start}*{suffix}"):
        named = path.name.removeprefix(start).removesuffix(suffix)
        try:
            found[Version(named)] = path
        except InvalidVersion:  # a choice of tests, or a checkout
            continue
    return {str(version): found[version] for version in sorted(found)}


def ran(reports: Path = REPORTS) -> list[dict[str, object]]:
    """Return how many tests passed, failed and were skipped in each version."""
    found = versions(TESTED, ".xml", reports)
    names = ("passed", "failed", "skipped")
    return [
        {"version": version, **dict(zip(names, count(reports, path.name), strict=True))}
        for version, path in found.items()
    ]


def compared(reports: Path = REPORTS) -> list[dict[str, object]]:
    """Return how many interfaces and names of each version were compared, and how many differ."""
    found = versions(COMPARED, ".json", reports)
    return [{"version": version, **json.loads(path.read_text())} for version, path in found.items()]
