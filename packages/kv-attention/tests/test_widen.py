"""The only assembly of the kernels, emulated instruction by instruction.

Triton's interpreter does not run this assembly, so this emulation replaces a GPU.
"""

import re

import pytest
import torch

from kv_attention.gpu.reading import WIDEN


def permuted(low: int, high: int, selector: int) -> int:
    """`prmt.b32`: each nibble of the selector selects one of eight bytes."""
    both = low | high << 32
    picked = [both >> (8 * (selector >> 4 * i & 0xF)) & 0xFF for i in range(4)]
    return sum(byte << (8 * i) for i, byte in enumerate(picked))


def halves(word: int) -> torch.Tensor:
    """Return a 32-bit register as two float16 numbers."""
    return torch.tensor([word & 0xFFFF, word >> 16]).to(torch.uint16).view(torch.float16)


def carried_out(word: int, mask: int) -> list[float]:
    """Return the numbers for the four bytes of a register under a mask."""
    registers = {"$2": word, "$3": mask}

    def value(name: str) -> int:
        return int(name, 0) if name[0].isdigit() else registers[name]

    lines = re.findall(r"^\s*([a-z0-9.]+) (.*);$", str(WIDEN.value), re.MULTILINE)
    for operation, operands in lines:
        into, *sources = operands.split(", ")
        given = [value(name) for name in sources] if operation != ".reg" else []
        if operation == "and.b32":
            registers[into] = given[0] & given[1]
        elif operation == "mov.b32":
            registers[into] = given[0]
        elif operation == "prmt.b32":
            registers[into] = permuted(*given)
        elif operation == "sub.f16x2":
            bits = (halves(given[0]) - halves(given[1])).view(torch.uint16).tolist()
            registers[into] = bits[0] | bits[1] << 16
        else:
            assert operation.startswith(".reg"), operation
    return [*halves(registers["$0"]).tolist(), *halves(registers["$1"]).tolist()]


@pytest.mark.parametrize("mask", [0xFF, 0x0F, 0xF0, 0x03, 0x30, 0x80])
def test_every_byte_becomes_its_number_under_every_mask(mask):
    for first in range(0, 256, 4):
        four = [first, first + 1, 255 - first, first ^ 0x5A]
        word = sum(byte << (8 * i) for i, byte in enumerate(four))
        masks = mask * 0x01010101
        assert carried_out(word, masks) == [float(byte & mask) for byte in four]


def test_masks_may_differ_within_a_register():
    assert carried_out(0xFFFFFFFF, 0x0180F00F) == [15.0, 240.0, 128.0, 1.0]
