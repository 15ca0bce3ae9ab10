"""Running the script of an environment, in its interpreter."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from _work import Row, Work, checked

HERE: Final = Path(__file__).parent
# The session of nox that made the environment, where it is not this one, and the script.
SCRIPTS: Final = {
    "ours": (None, "ours_rows.py"),
    "quantized": ("peers-quantized", "quantized_rows.py"),
    "vllm": ("peers-vllm", "vllm_rows.py"),
    "kvpress": ("peers-kvpress", "kvpress_rows.py"),
    "kvzip": ("peers-kvpress", "kvpress_rows.py"),
}
OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True, slots=True)
class Run:
    """What all scripts are started with."""

    model: str  # folder
    ends: tuple[int, ...]
    environments: Path
    threads: int | None = None  # of each script; None: as many as torch likes

    def rows(self, name: str, work: Work) -> Iterator[Row]:
        """Start an environment's script on some work, and give its rows as they come.

        Raises:
            RuntimeError: it failed; what it printed has been given.
        """
        session, script = SCRIPTS[name]
        own = session is None
        python = sys.executable if own else str(self.environments / session / "bin" / "python")
        yield from printed((python, str(HERE / script)), work, self.threads)


def printed(command: tuple[str, ...], work: Work, threads: int | None = None) -> Iterator[Row]:
    """Run a command with a file of work behind it, and give the rows that it prints.

    Raises:
        RuntimeError: it failed.
        ValueError: it printed something else.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "work.json"
        work.write(path)
        given = (*command, str(path))
        env = {**os.environ, **OFFLINE}
        if threads is not None:
            env["OMP_NUM_THREADS"] = str(threads)
        process = subprocess.Popen(given, stdout=subprocess.PIPE, text=True, env=env)
        with process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    yield checked(json.loads(line))
            except BaseException:
                process.kill()
                raise
    if process.returncode:
        raise RuntimeError(f"{command[-1]} ended with {process.returncode}; it says why above")
