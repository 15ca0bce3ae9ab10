"""Tile sizes and program counts, tuned per architecture and class of tokens.

A decode step has as many programs as the device holds at once, and shares the tiles out among them:
with fewer, processors wait for memory, and with more, the last ones begin when others end. A
multiprocessor holds a program for each share of its registers and of its shared memory, so the
number follows from what the compiler made of the kernel.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch
import triton
import triton.language as tl

from kv_attention.gpu.arguments import PartArguments, padded
from kv_attention.gpu.planes import planar
from kv_attention.gpu.tiles import soften


@dataclass(frozen=True, slots=True)
class Machine:
    """The device that runs the kernels."""

    architecture: str  # such as sm_90, or "interpreter"
    processors: int  # multiprocessors
    asm: bool  # whether PTX is supported

    @property
    def interpreted(self) -> bool:
        """Whether kernels run in Triton's interpreter, for tests."""
        return self.architecture == "interpreter"


@dataclass(frozen=True, slots=True)
class Tiling:
    """A kernel's tile sizes and compile options."""

    block: int  # tokens of a tile
    warps: int
    stages: int  # pipelined loads of a loop
    queries: int = 64  # rows of a tile of queries in prefill
    programs: int = 1  # of a decode step that a multiprocessor holds at once


@cache
def machine_of(device: torch.device) -> Machine:
    """Return the properties of a device."""
    if not isinstance(soften, triton.JITFunction):
        return Machine("interpreter", 2, False)
    about = torch.cuda.get_device_properties(device)
    name = f"sm_{about.major}{about.minor}"
    asm = torch.version.hip is None
    return Machine(name, about.multi_processor_count, asm)


def tiling(machine: Machine, kernel: str, part: PartArguments, q: torch.dtype) -> Tiling:
    """Return the tuned tiling of such tokens on such a device, or a default."""
    data = tuned()["tiles"]
    found: dict[str, int] = {}
    for name in classes(part, q, interpreted=machine.interpreted):
        for architecture in ("default", machine.architecture):
            found |= data.get(architecture, {}).get(kernel, {}).get(name, {})
    return Tiling(**found)


def classes(part: PartArguments, q: torch.dtype, *, interpreted: bool) -> Iterator[str]:
    """Yield the names of tuned tile sizes; a later one overrides those before it.

    Addresses of vectors whose length is not a power of two need registers, and products in float32
    several times those of other dtypes, so these classes have smaller tiles. Those of more than 256
    dimensions need twice the shared memory, and codes that are multiplied by plane less. Those of
    more than 128 need more registers.
    """
    yield "default"
    if planar(part, part.products(q, interpreted=interpreted)):
        yield "planar"
        yield class_of(part).replace("pages", "planar")
    sizes = [padded(form[1]) for form in (part.key, part.value)]
    if 128 < max(sizes) <= 256:
        yield "long"
    if sizes != [part.key[1], part.value[1]]:
        yield "uneven"
    if max(sizes) > 256:
        yield "wide"
    if tl.float32 in part.products(q, interpreted=interpreted):
        yield "float32"
        yield f"{class_of(part)}-float32"
    else:
        yield class_of(part)


def class_of(part: PartArguments) -> str:
    """Return the class of tokens: the bits of keys and values, and the larger dimension."""
    names = [f"{form[2]}" if form[0] == 0 else "plain" for form in (part.key, part.value)]
    where = "pages" if part.paged else "dense"
    return f"{where}-{names[0]}-{names[1]}-{max(part.key[1], part.value[1])}"


@cache
def tuned() -> Any:
    """Read the results of `benchmarks/gpu_tune.py`.

    `tiles` are fields of `Tiling` by architecture, kernel and one of `classes`.
    """
    return json.loads(files("kv_attention.gpu").joinpath("tuned.json").read_text())
