"""Tile sizes: which entry of the table applies to which tokens."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kv_attention import DenseTokens
from kv_attention.gpu import tuning
from kv_attention.gpu.arguments import PartArguments, dense_part, paged_part
from kv_attention.gpu.tuning import Machine, Tiling, classes, resident, tiling, tuned
from kv_policy import CacheShape, PagedTokens, PageLayout, parse

UNKNOWN = Machine("sm_75", 1, True)
TABLE = {
    "tiles": {
        "default": {
            "prompt": {
                "default": {"block": 1, "warps": 2, "stages": 3},
                "uneven": {"warps": 4},
                "float32": {"block": 8},
            }
        },
        "sm_90": {
            "prompt": {"default": {"block": 16}, "dense-plain-plain-64": {"block": 32, "stages": 5}}
        },
    }
}


def plain(dim: int, dtype: torch.dtype) -> PartArguments:
    """Return the arguments of dense tokens."""
    key = torch.zeros(1, 1, 4, dim, dtype=dtype)
    return dense_part(DenseTokens(key, key, torch.zeros(1, 4, dtype=torch.long), full=True))


@pytest.mark.parametrize(
    ("dim", "stored", "asked", "expected"),
    [
        (64, torch.bfloat16, torch.bfloat16, ["default", "dense-plain-plain-64"]),
        (40, torch.float16, torch.float16, ["default", "uneven", "dense-plain-plain-40"]),
        (64, torch.float32, torch.bfloat16, ["default", "float32", "dense-plain-plain-64-float32"]),
        (64, torch.bfloat16, torch.float32, ["default", "float32", "dense-plain-plain-64-float32"]),
        (512, torch.bfloat16, torch.bfloat16, ["default", "wide", "dense-plain-plain-512"]),
        (
            300,
            torch.float32,
            torch.float32,
            [
                "default",
                "uneven",
                "wide",
                "float32",
                "dense-plain-plain-300-float32",
            ],
        ),
        (8, torch.bfloat16, torch.bfloat16, ["default", "uneven", "dense-plain-plain-8"]),
    ],
)
def test_names_tell_what_takes_registers(
    dim: int, stored: torch.dtype, asked: torch.dtype, expected: list[str]
) -> None:
    """In Triton's interpreter bfloat16 is computed in float32, on a GPU it is not."""
    assert list(classes(plain(dim, stored), asked, interpreted=False)) == expected


def test_a_later_name_goes_over_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the same name, the architecture overrides the default."""
    monkeypatch.setattr(tuning, "tuned", lambda: TABLE)
    hopper, bf16 = replace(UNKNOWN, architecture="sm_90"), torch.bfloat16
    even, odd = plain(64, bf16), plain(40, bf16)
    assert tiling(UNKNOWN, "prompt", even, bf16) == Tiling(1, 2, 3)
    assert tiling(UNKNOWN, "prompt", odd, bf16) == Tiling(1, 4, 3)
    assert tiling(hopper, "prompt", odd, bf16) == Tiling(16, 4, 3)
    assert tiling(hopper, "prompt", even, bf16) == Tiling(32, 2, 5)
    assert tiling(hopper, "prompt", even, torch.float32) == Tiling(8, 2, 3)


@pytest.mark.parametrize("architecture", sorted(tuned()["tiles"]))
def test_every_entry_is_sizes_of_a_kernel_that_there_is(architecture: str) -> None:
    """Entries of other kernels would never be used, and unknown fields would fail late."""
    known = tuned()["tiles"]["default"]
    for kernel, entries in tuned()["tiles"][architecture].items():
        assert kernel in known
        for sizes in entries.values():
            replace(Tiling(16, 4, 1), **sizes)


RESULT = Path(__file__).parents[3] / "benchmarks/results/triton_compile.json"
MOST_SHARED = {"sm_80": 164 * 1024, "sm_90": 228 * 1024}  # bytes of a multiprocessor
NAMES = ("bf16", "fp16", *(f"k{key}v{value}" for key in (8, 4, 2, 1) for value in (8, 4, 2, 1)))


def pages(name: str) -> PartArguments:
    """Return the arguments of pages of a format for heads of 128 dimensions."""
    formats = parse(name).formats
    assert formats is not None
    layout = PageLayout.sized(formats.bind(CacheShape(1, 1, 4, 128, 128))[0], 16)
    data, table = torch.zeros(1, layout.nbytes, dtype=torch.uint8), torch.zeros(1, 1, 1).int()
    return paged_part(PagedTokens(data, table, table[0], layout), watched=False)


@pytest.mark.skipif(not RESULT.exists(), reason="compiled kernels are measured in the repository")
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
