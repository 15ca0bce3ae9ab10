"""Every kernel with arguments that it is compiled for ahead of time, GPU or not."""

from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import torch

from kv_paging.gpu import entering, giving, leaving, moving, reading, writing
from kv_paging.gpu.numbers import Half, Layout, rows, streams

# A kernel, the types of its arguments by name, and the values of those that are constants.
Example: TypeAlias = tuple[Any, dict[str, Any], dict[str, Any]]

DIM: Final = 128
TOKENS: Final = 16
FORMATS: Final = {"K8V4": (8, 4), "K4V2": (4, 2), "K2V1": (2, 1), "bf16": (0, 0)}

_POINTERS: Final = {
    "u8": ("data", "keep", "stay", "held"),
    "i32": ("table", "lengths", "gaps", "ids", "given", "gives", "takes"),
    "i64": ("streams", "start", "place", "position", "until", "found", "after"),
    "fp32": ("score",),
    "bf16": ("key", "value"),
}
_TYPES: Final = {name: f"*{kind}" for kind, names in _POINTERS.items() for name in names}
_SCALARS: Final = ("pitch", "width", "length", "nbytes", "size", "slots", "count", "first")


def layout(name: str, *, reverse: bool = False) -> Layout:
    """Lay out pages of `TOKENS` tokens, with scores and positions, in one of `FORMATS`."""
    halves: list[Half] = []
    offset = 0
    for bits in FORMATS[name]:
        if bits:
            codes, meta = TOKENS * DIM * bits // 8, TOKENS * 4
            halves.append((0, DIM, bits, DIM, offset, offset + codes))
            offset += codes + meta
        else:
            halves.append((3, DIM, 0, 1, offset, 0))
            offset += TOKENS * DIM * torch.bfloat16.itemsize
    return TOKENS, offset, offset + 4 * TOKENS, int(reverse), 16, halves[0], halves[1]


def shipped() -> Iterator[tuple[str, Example]]:
    """Give each kernel, by its name, for each of `FORMATS`."""
    yield "gaps", _example(moving.gaps_kernel, MANY=writing.SCAN)
    whole = {"page": "*i64", "row": "*i64", "source": "*i64", "target": "*i64"}
    yield "copy", _example(moving.copy_kernel, whole, UNIT=4, MANY=1024)
    yield (
        "give",
        _example(giving.give_kernel, {"count": "*i64"}, POISON=False, ROWS=8, MANY=writing.SCAN),
    )
    for name in FORMATS:
        for each, example in _of_format(name, whole):
            yield f"{each} {name}", example


def _of_format(name: str, whole: dict[str, Any]) -> Iterator[tuple[str, Example]]:
    one = layout(name)
    size, many = rows(one), writing.SCAN
    strides = {"key_strides": ("i32", "i32", "i32"), "value_strides": ("i32", "i32", "i32")}
    at = {"LAYOUT": one, "MANY": many}
    yield "write", _example(writing.write_kernel, strides, STREAMS=1, COLUMNS=size, **at)
    bare = (one[0], -1, -1, *one[3:])  # whose pages hold neither scores nor positions
    pairs = {"key_strides": ("i32", "i32"), "value_strides": ("i32", "i32")}
    yield "place", _example(writing.place_kernel, whole | pairs, LAYOUT=bare, ROWS=size)
    yield "close_up", _example(moving.close_up_kernel, ROWS=size, **at)
    found = {} if name == "bf16" else {"key": "*fp32", "value": "*fp32"}
    yield "read", _example(reading.read_kernel, found, LAYOUT=one, HOLES=False, ROWS=size)
    yield "rescore", _example(reading.rescore_kernel, HOLES=False, **at)
    yield "weakest", _example(reading.weakest_kernel, HOLES=False, STREAMS=1, **at)
    two = (one, layout("K2V1", reverse=True))
    steps: dict[str, Any] = {
        "tables": ("*i32", "*i32"),
        "widths": ("i32", "i32"),
        "lengths": ("*i32", "*i32"),
        "choice": ("*u8", "*u8", "*u8"),
        "kept": ("*fp32", "*fp32", "*i32", "*i32"),
        "free": "*i64",
        **pairs,
    }
    of_two = {"LAYOUTS": two, "ROWS": streams(*two)}
    yield "leave", _example(leaving.leave_kernel, steps, **of_two)
    yield "enter", _example(entering.enter_kernel, steps, MANY=many, **of_two)


def _example(kernel: Any, other: dict[str, Any] | None = None, /, **constants: Any) -> Example:
    types = _TYPES | {name: "i32" for name in _SCALARS} | (other or {})
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    return kernel, signature, constants
