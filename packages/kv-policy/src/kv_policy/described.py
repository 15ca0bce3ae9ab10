"""A page layout as the few numbers that a compiled kernel takes, whatever it is compiled with."""

from functools import lru_cache
from typing import Final, NamedTuple

import torch

from kv_policy.codec import BitLayout, Codec
from kv_policy.pages import PageLayout
from kv_policy.raw import RawCodec

NUMBERS: Final = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}  # 0: integer codes


def _is_known(codec: Codec) -> bool:
    """Whether vectors stand alone, as integer codes or as plain numbers of a dtype known here."""
    layout = codec.layout
    if layout is not None:
        return layout.tokens == 1 and codec.block == 1 and codec.parts == layout.parts
    return isinstance(codec, RawCodec) and codec.dtype in NUMBERS


def _code_numbers(codec: Codec) -> tuple[int, int, int, int]:
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


class KernelLayout(NamedTuple):
    """A layout in numbers, or why compiled code cannot know it.

    Attributes:
        declined: Why not, or None.
        formats: For keys and then values: the kind of number (0: integer codes, else one of
            `NUMBERS`), dimensions, bits of a code, and dimensions that share a scale.
        places: Tokens of a page, then the byte offsets of the codes or numbers and the metadata of
            keys, and of those of values.
        positions: Byte offset of the positions, whether there are any or not.
    """

    declined: str | None
    formats: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    positions: int = -1


def described(layout: PageLayout) -> KernelLayout:
    """Give a layout in numbers, worked out once for each."""
    try:
        return _described(layout)
    except TypeError:  # a codec that cannot be hashed
        return _described.__wrapped__(layout)


@lru_cache(maxsize=256)
def _described(layout: PageLayout) -> KernelLayout:
    key, value = layout.format.key, layout.format.value
    for codec in (key, value):
        if not _is_known(codec):
            return KernelLayout(f"{codec!r} is read and written by its own code")
    starts = [offset for offset, _, _ in layout.segments]
    split = len(key.parts)
    offsets = [start for half in (starts[:split], starts[split:]) for start in (*half, 0)[:2]]
    formats = (*_code_numbers(key), *_code_numbers(value))
    return KernelLayout(None, formats, (layout.tokens, *offsets), layout.position_offset)
