"""Tile sizes: which entry of the table applies to which tokens."""

from dataclasses import replace

import pytest
import torch

from kv_attention import DenseTokens
from kv_attention.gpu import tuning
from kv_attention.gpu.arguments import PartArguments, dense_part
from kv_attention.gpu.tuning import Machine, Tiling, classes, tiling, tuned

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
