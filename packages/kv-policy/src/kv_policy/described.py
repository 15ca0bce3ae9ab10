"""What compiled kernels read, independent of the compiler: a page layout as plain numbers."""

import struct
from functools import lru_cache
from typing import Final, NamedTuple

import torch

from kv_policy.bit_layout import BitLayout, PlaneLayout
from kv_policy.codec import Codec
from kv_policy.contract import LayerView
from kv_policy.pages import PageLayout
from kv_policy.raw import RawCodec

NUMBERS: Final = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}  # 0: integer codes
LEVELS: Final = 4  # the kind of codes that stand for levels
MOST_LEVELS: Final = 16  # of a codebook


def unreadable(view: LayerView) -> str | None:
    """Return why kernels do not read the keys and values of a view, or do not rotate its keys."""
    if view.keys is None or view.values is None or view.shape.rope is None:
        return "no keys, no values, or an unknown rotary embedding"
    for vectors in (view.keys, view.values):
        if vectors.dtype not in NUMBERS:
            return f"vectors in {vectors.dtype}"
    return None


def _is_known(codec: Codec, *, blocks: bool, planes: bool) -> bool:
    """Whether vectors are codes or numbers of a known dtype, one by one or in blocks."""
    layout = codec.layout
    if layout is None:
        return isinstance(codec, RawCodec) and codec.dtype in NUMBERS
    if isinstance(layout, PlaneLayout) and not (planes and _is_native(layout)):
        return False
    records = codec.block // layout.tokens
    parts = tuple(records * part for part in layout.parts)
    return (blocks or codec.block == 1) and codec.parts == parts


def _is_native(layout: PlaneLayout) -> bool:
    """Whether codes stand for themselves, or for few levels and a vector has one scale."""
    few = layout.groups == 1 and layout.tokens == 1 and len(layout.levels) <= MOST_LEVELS
    return few or not layout.levels


def _code_numbers(codec: Codec) -> tuple[int, int, int, int]:
    """Return the kind of number, dimensions, bits per code, and dimensions per scale.

    Raises:
        TypeError: only the codec's own decode can read it.
    """
    layout = codec.layout
    if isinstance(layout, BitLayout | PlaneLayout):
        kind = LEVELS if _levels(codec) else 0
        return kind, layout.dim, layout.bits, layout.group
    if not isinstance(codec, RawCodec):
        raise TypeError(f"{codec!r} has no layout")
    return NUMBERS[codec.dtype], codec.dim, 0, 1


def _levels(codec: Codec) -> tuple[int, ...]:
    """Return what codes stand for, each as the bits of a float64; none: themselves."""
    layout = codec.layout
    levels = layout.levels if isinstance(layout, PlaneLayout) else ()
    return struct.unpack(f"={len(levels)}q", struct.pack(f"={len(levels)}d", *levels))


class KernelLayout(NamedTuple):
    """A layout in numbers, or the reason why compiled kernels do not support it.

    A page has the codes of its tokens one after another, and then the metadata of as many groups of
    tokens as there are, `share` tokens each.

    Attributes:
        declined: The reason, or None.
        formats: For keys, then values: the kind of number (0: integer codes, one of `NUMBERS`, or
            `LEVELS`), dimensions, bits per code, and dimensions per scale.
        places: Tokens per page, then the byte offsets of codes (or numbers) and metadata of keys,
            then those of values.
        positions: Byte offset of the positions, whether the layout has any or not.
        share: How many tokens have the same scales in keys, and in values.
        levels: What the codes of keys of the kind `LEVELS` stand for, then those of values, as the
            bits of float64 numbers.
    """

    declined: str | None
    formats: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    positions: int = -1
    share: tuple[int, int] = (1, 1)
    levels: tuple[int, ...] = ()


def described(layout: PageLayout, *, blocks: bool = False, planes: bool = False) -> KernelLayout:
    """Return the layout in numbers; cached.

    Args:
        layout: the layout.
        blocks: whether formats that encode several tokens together are supported.
        planes: whether codes of 3 bits are, and codes that stand for levels.
    """
    try:
        return _described(layout, blocks, planes)
    except TypeError:  # an unhashable codec
        return _described.__wrapped__(layout, blocks, planes)


@lru_cache(maxsize=256)
def _described(layout: PageLayout, blocks: bool, planes: bool) -> KernelLayout:
    key, value = layout.format.key, layout.format.value
    if layout.format.value_in_key:
        return KernelLayout("values that are the first dimensions of their keys")
    for codec in (key, value):
        if not _is_known(codec, blocks=blocks, planes=planes):
            return KernelLayout(f"{codec!r} is read and written by its own code")
    starts = [offset for offset, _, _ in layout.segments]
    split = len(key.parts)
    offsets = [start for half in (starts[:split], starts[split:]) for start in (*half, 0)[:2]]
    formats = (*_code_numbers(key), *_code_numbers(value))
    places = (layout.tokens, *offsets)
    share, levels = (_share(key), _share(value)), (*_levels(key), *_levels(value))
    return KernelLayout(None, formats, places, layout.position_offset, share, levels)


def _share(codec: Codec) -> int:
    return 1 if codec.layout is None else codec.layout.tokens
