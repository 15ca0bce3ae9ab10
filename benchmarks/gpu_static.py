# environment: triton
"""What can be said of the GPU path without a GPU: instructions, launches, and waits of the host.

Instructions are those of the loop of the decode kernel, compiled for sm_90, per 64 tokens and warp:
heads of 128 dimensions, four query heads over a KV head, pages of 16 tokens, queries in bfloat16.

Launches are of a decode step over 32 layers: kernels of Triton, and operations of torch other than
views and allocations. Over slots in vLLM's blocks, metadata included, everything that would be on a
GPU is on the device `meta`, so a read of it by the host raises. Over pages they are counted in
Triton's interpreter, with 2 and with 4 layers, and every tensor counts as one on the device.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)  # what it would interpret it could not compile

import _result
import torch
from _compiled import compiled, launches_of, recorded
from _gpu_launches import FREE
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton_compile import GROUP, HEADS, format_of, pages_of, queries

from kv_attention.gpu.arguments import paged_part
from kv_attention.gpu.decode import decode
from kv_attention.gpu.tuning import Machine
from kv_runtime import Blocks, SlotLayer

LAYERS: Final = 32
PAGED: Final = {"kv-compress:rate=4+k8v4": "kv_compress", "leankv": "leankv"}
REQUESTS: Final = 8
LENGTH: Final = 2000
TOKENS: Final = 16
DIM: Final = 128
H100: Final = Machine("sm_90", 132, True)
META: Final = torch.device("meta")
Row = dict[str, object]


def instructions(name: str) -> Row:
    """Compile the decode kernel for a format, and count its loop."""
    part = paged_part(pages_of(name), watched=False)
    q, position = queries(part, 1, torch.bfloat16)
    launches = launches_of(lambda: decode(q, position, [part], part.value[1], 0.1, H100))
    (launch,) = (each for each in launches if each.name == "decode_kernel")
    found, block = compiled(launch, 90), int(launch.named["BLOCK"])
    return {
        "kind": "kernel",
        "format": name,
        "block": block,
        "warps": launch.named["num_warps"],
        "per_64_tokens": int(str(found["loop"])) * 64 / block,
        **found,
    }


class Operations(TorchDispatchMode):
    """Counts operations of torch that launch a kernel on the device."""

    def __init__(self) -> None:
        """Start at 0."""
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one."""
        result = func(*args, **(kwargs or {}))
        given = tree_leaves((args, kwargs, result))
        name = func.__name__.split(".")[0]
        if name not in FREE and any(isinstance(x, torch.Tensor) and x.is_meta for x in given):
            self.found[name] += 1
        return result


@contextmanager
def on_a_gpu() -> Iterator[None]:
    """Let kernels be taken for tensors on `meta`."""
    with (
        patch("kv_attention.gpu.backend.declined", lambda inputs: None),
        patch("kv_attention.gpu.tuning.machine_of", lambda device: H100),
        patch("kv_paging.triton_kernels.missing", lambda: None),
        patch("kv_paging.triton_kernels.declined", lambda layout, device: None),
        patch("kv_policy.interpreter.missing", lambda: None),
    ):
        yield


def slots(name: str) -> Row:
    """Count the launches of a decode step over slots."""
    form = format_of(name)
    nbytes = HEADS * TOKENS * form.nbytes
    columns = -(-LENGTH // TOKENS)
    cache = torch.empty(REQUESTS * columns, HEADS, TOKENS, form.nbytes, dtype=torch.uint8).to(META)
    query = torch.empty(REQUESTS, HEADS * GROUP, DIM, dtype=torch.bfloat16, device=META)
    key = torch.empty(REQUESTS, HEADS, DIM, dtype=torch.bfloat16, device=META)
    start = torch.arange(REQUESTS + 1)  # which the host has
    length = torch.empty(REQUESTS, dtype=torch.int32, device=META)
    table = torch.empty(REQUESTS, columns, dtype=torch.int32, device=META)
    slot = torch.empty(REQUESTS, dtype=torch.long, device=META)
    with on_a_gpu(), recorded() as kernels, Operations() as operations:
        blocks = Blocks.of(form, HEADS, TOKENS, nbytes, META, "triton")
        layer = SlotLayer(form, DIM**-0.5, "triton")
        operations.found.clear()
        step = blocks.step(start, length, LENGTH, table, slot)
        before = operations.found.copy()
        for _ in range(LAYERS):
            layer.forward(query, key, key, cache, step, torch.empty_like(query))
    return {
        "kind": "launches",
        "format": name,
        "layers": LAYERS,
        "triton": dict(Counter(each.name for each in kernels)),
        "torch": dict(operations.found),
        "torch_once": dict(before),
        "launches": len(kernels) + operations.found.total(),
        "host_reads": 0,  # or `meta` would have raised
    }


def pages() -> Iterator[Row]:
    """Yield the launches of a decode step over pages, as in transformers and as in vLLM."""
    script = Path(__file__).with_name("_gpu_launches.py")
    command = (sys.executable, str(script), json.dumps(list(PAGED)))
    settings = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=settings, stdout=subprocess.PIPE, text=True, check=True)
    found = {(e["host"], e["policy"], e["layers"]): e["found"] for e in json.loads(done.stdout)}
    for host, policy in dict.fromkeys(key[:2] for key in found):
        few, more = (Counter(found[host, policy, layers]) for layers in (2, 4))
        reads = [each.pop("reads", 0) for each in (few, more)]
        all_of = [sum(each.values()) for each in (few, more)]
        yield {
            "kind": "pages",
            "host": host,
            "policy": policy,
            "layers": LAYERS,
            "launches": all_of[0] + (all_of[1] - all_of[0]) * (LAYERS - 2) / 2,
            "host_reads": reads[0] + (reads[1] - reads[0]) * (LAYERS - 2) / 2,
            "two_layers": few,
            "four_layers": more,
        }


def main() -> None:
    """Count, compile, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few formats, and no file")
    quick = parser.parse_args().quick
    names = ("k8v4",) if quick else ("k8v4", "k4v2", "bf16")
    rows = [*(slots(name) for name in names), *(instructions(name) for name in names), *pages()]
    figures: dict[str, float] = {}
    for row in rows:
        if row["kind"] == "launches":
            figures[f"launches_{row['format']}"] = float(str(row["launches"]))
            figures["host_reads_slots"] = float(str(row["host_reads"]))
        elif row["kind"] == "pages":
            host = "" if row["host"] == "vllm" else "_transformers"
            figures[f"launches_{PAGED[str(row['policy'])]}{host}"] = float(str(row["launches"]))
        else:
            figures[f"instructions_{row['format']}"] = float(str(row["per_64_tokens"]))
            figures[f"shared_stores_16B_{row['format']}"] = float(str(row["loop_shared_stores"]))
    figures["spills"] = float(sum(bool(row.get("spills")) for row in rows))
    _result.write("gpu_static", figures, rows, quick=quick)
    for name, value in figures.items():
        print(f"{name:32} {value:.0f}")


if __name__ == "__main__":
    main()
