"""Standalone pages as users create them: a report, and the inspection of a cache.

`nox -s browser` writes them with `kv-serve` and the real model, in a small size, to open them.
"""

import subprocess
import sys
from pathlib import Path
from typing import Final

BASIS: Final = "found.safetensors"
COMPARED: Final = (
    "k8v4,k4v2,streaming:budget=64,kv-compress:rate={2,4}+k8v4,"
    f"zack:file={BASIS},rate=0.2+kv-compress:rate=2+k8v4"
)
SIZE: Final = ("--length", "500", "--samples", "2", "--continuation", "16")
TASKS: Final = ("--task", "needle", "--task", "multikey", "--task", "nll")
TEXT: Final = (
    "The harbour was quiet that morning, and the boats lay still. Nobody had told the keeper of "
    "the light that the war was over, so he went up the stairs at dusk, as he had done every day "
    "for eleven years. "
)


def kv_serve(folder: Path, *arguments: str) -> None:
    """Run a command in a folder.

    Raises:
        subprocess.CalledProcessError: the command fails.
    """
    command = Path(sys.executable).parent / "kv-serve"
    subprocess.run((str(command), *arguments), cwd=folder, check=True)


def main() -> None:
    """Write `report/index.html` and `inspect/index.html` into the given folder."""
    folder = Path(sys.argv[1])
    for name in ("report", "inspect"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    if not (folder / BASIS).exists():
        kv_serve(folder, "calibrate", "zack", "--tokens", "4096", "--out", BASIS)
    asked = ("--policy", COMPARED, *TASKS, *SIZE, "--json", "result.json")
    kv_serve(folder, "eval", *asked)
    kv_serve(folder, "report", "result.json", "--out", "report/index.html")
    look = ("--policy", "leankv:window=16,t_low=0.1", "--html", "inspect/index.html")
    kv_serve(folder, "inspect", *look, TEXT * 4)


if __name__ == "__main__":
    main()
