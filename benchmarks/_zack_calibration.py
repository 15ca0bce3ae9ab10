"""What calibration costs: measured on this machine, and counted for models that do not fit it."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

READ = "from kv_serve.cli import main; main()"
LOAD = """
import torch
from kv_eval.calibrate.collect import Reading
from kv_transformers.models import load_model
from kv_eval.tasks import default_text
loaded = load_model()
window = Reading().windows(loaded, default_text())[0]
with torch.inference_mode():
    loaded.model.base_model(input_ids=window, use_cache=False)
"""


def measured(out: Path, tokens: int) -> dict[str, object]:
    """Calibrate in a process of its own, and load the model and read one window in another.

    What a process may have held at most counts what it was started from, so this one should hold
    little yet.
    """
    options = ("calibrate", "zack", "--out", str(out), "--tokens", str(tokens), "--json")
    calibrate = _run(READ, *options)
    load = _run(LOAD)
    return {
        "kind": "calibration",
        "tokens": tokens,
        "threads": 1,
        "seconds": calibrate.seconds,
        "cpu_seconds": calibrate.cpu_seconds,
        "peak_bytes": calibrate.peak_bytes,
        "one_window_seconds": load.seconds,
        "one_window_cpu_seconds": load.cpu_seconds,
        "one_window_peak_bytes": load.peak_bytes,
        "peak_over_one_window": calibrate.peak_bytes / load.peak_bytes,
        "file_bytes": out.stat().st_size,
    }


@dataclass(frozen=True)
class Process:
    """What a process took from its start to its end."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def _run(code: str, *arguments: str) -> Process:
    began = time.perf_counter()
    process = subprocess.Popen(
        (sys.executable, "-c", code, *arguments),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"calibration ended with status {process.returncode}")
    seconds = time.perf_counter() - began
    return Process(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model of the Llama family."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int  # of keys and values
    group: int
    dim: int
    vocabulary: int
    tied: bool = False

    @property
    def parameters(self) -> int:
        """Weights, norms left out."""
        queries = self.heads * self.group * self.dim
        attention = 2 * self.hidden * (queries + self.heads * self.dim)
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + embeddings

    @property
    def forward_flops(self) -> int:
        """Per token, without the logits, which calibration does not ask for, and the softmax."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return 2 * (self.parameters - embeddings)


MODELS = (
    Sizes("SmolLM2-135M", 30, 576, 1536, 3, 3, 64, 49152, tied=True),
    Sizes("Llama-3.1-8B", 32, 4096, 14336, 8, 4, 128, 128256),
    Sizes("Llama-3.1-70B", 80, 8192, 28672, 8, 8, 128, 128256),
)


def on_paper(sizes: Sizes) -> dict[str, object]:
    """Count bytes and operations of calibration, of one KV head at a time (`--together 1`).

    Statistics are four matrices of D by D a head in float64: of queries, keys, values and the
    output projection. A token adds an outer product for each query head and two for each KV head,
    2 D² operations each; those are in float64, the model's are not.
    """
    matrices = sizes.layers * sizes.heads * sizes.dim**2
    flops = matrices * (sizes.group + 2) * 2
    return {
        "kind": "calibration on paper",
        "model": sizes.name,
        "parameters": sizes.parameters,
        "statistics_bytes": 4 * matrices * 8,
        "statistics_bytes_per_parameter": 4 * matrices * 8 / sizes.parameters,
        "flops_per_token": flops,
        "forward_flops_per_token": sizes.forward_flops,
        "flops_over_forward": flops / sizes.forward_flops,
        "once_for_the_output_flops": matrices * sizes.group * 2 * sizes.hidden,
    }
