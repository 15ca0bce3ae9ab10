"""A decode step has as many programs as a multiprocessor holds of the compiled kernels."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is available for Linux only")

from kv_attention.gpu.arguments import PartArguments, paged_part
from kv_attention.gpu.tuning import Machine, tiling
from kv_policy import CacheShape, PagedTokens, PageLayout, parse

RESULT = Path(__file__).parents[1] / "benchmarks" / "results" / "triton_compile.json"
REGISTERS = 65_536  # of a multiprocessor
MOST_SHARED = {"sm_80": 164 * 1024, "sm_90": 228 * 1024}  # bytes of a multiprocessor
NAMES = ("bf16", "fp16", *(f"k{key}v{value}" for key in (8, 4, 2, 1) for value in (8, 4, 2, 1)))


def resident(registers: int, shared: int, warps: int, most_shared: int) -> int:
    """Return the programs that a multiprocessor holds at once.

    Args:
        registers: of a thread, at most 255.
        shared: bytes of shared memory of a program; the device needs 1,024 more.
        warps: of a program, of 32 threads each.
        most_shared: bytes of shared memory of a multiprocessor.
    """
    whole = 8 * -(-registers // 8)  # registers are allocated to a warp in units of 256
    return min(REGISTERS // (32 * warps * whole), most_shared // (shared + 1024))


def pages(name: str) -> PartArguments:
    """Return the arguments of pages of a format for heads of 128 dimensions."""
    formats = parse(name).formats
    assert formats is not None
    layout = PageLayout.sized(formats.bind(CacheShape(1, 1, 4, 128, 128))[0], 16)
    data, table = torch.zeros(1, layout.nbytes, dtype=torch.uint8), torch.zeros(1, 1, 1).int()
    return paged_part(PagedTokens(data, table, table[0], layout), watched=False)


@pytest.mark.parametrize("architecture", MOST_SHARED)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_has_as_many_programs_as_the_device_holds(name: str, architecture: str) -> None:
    """By what the compiler made of the kernel; an architecture may hold more than the default."""
    rows = json.loads(RESULT.read_text())["rows"]
    row = next(
        each
        for each in rows
        if (each["kernel"], each["format"], each["architecture"])
        == ("decode_kernel", name, architecture)
    )
    machine = Machine(architecture, 132, True)
    form = tiling(machine, "decode", pages(name), torch.bfloat16)
    assert (form.block, form.warps) == (row["block"], row["warps"])
    sizes = row["registers"], row["shared"], row["warps"], MOST_SHARED[architecture]
    assert form.programs <= resident(*sizes) <= form.programs + 1
    if architecture == "sm_90":
        assert form.programs == resident(*sizes)
