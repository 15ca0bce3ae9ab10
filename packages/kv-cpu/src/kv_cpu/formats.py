"""What native code can read and write: the formats of stored vectors, as numbers."""

from typing import Final

import torch

from kv_policy import BitLayout, Codec, RawCodec

MOST_DIM: Final = 1024  # of a vector
NUMBERS: Final = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}  # 0: integer codes


def is_read(codec: Codec) -> bool:
    """Whether vectors stand alone, as integer codes or as plain numbers of a dtype known here."""
    layout = codec.layout
    if layout is not None:
        return layout.tokens == 1 and codec.block == 1 and codec.parts == layout.parts
    return isinstance(codec, RawCodec) and codec.dtype in NUMBERS


def code_numbers(codec: Codec) -> tuple[int, int, int, int]:
    """The kind of number, dimensions, bits of a code, and dimensions that share a scale.

    Raises:
        TypeError: the codec is read by its own decode alone.
    """
    layout = codec.layout
    if isinstance(layout, BitLayout):
        return 0, layout.dim, layout.bits, layout.group
    if not isinstance(codec, RawCodec):
        raise TypeError(f"{codec!r} has no layout")
    return NUMBERS[codec.dtype], codec.dim, 0, 1
