"""What compiled kernels read, independent of the compiler: a page layout as plain numbers."""

from functools import lru_cache
from typing import Final, NamedTuple

import torch

from kv_policy.codec import BitLayout, Codec
from kv_policy.contract import LayerView
from kv_policy.pages import PageLayout
from kv_policy.raw import RawCodec

NUMBERS: Final = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}  # 0: integer codes


def unreadable(view: LayerView) -> str | None:
    """Return why kernels do not read the keys and values of a view, or do not rotate its keys."""
    if view.keys is None or view.values is None or view.shape.rope is None:
        return "no keys, no values, or an unknown rotary embedding"
    for vectors in (view.keys, view.values):
        if vectors.dtype not in NUMBERS:
            return f"vectors in {vectors.dtype}"
    return None


def _is_known(codec: Codec) -> bool:
    """Whether vectors are encoded one by one, as integer codes or numbers of a known dtype."""
    layout = codec.layout
    if layout is not None:
        return layout.tokens == 1 and codec.block == 1 and codec.parts == layout.parts
    return isinstance(codec, RawCodec) and codec.dtype in NUMBERS


def _code_numbers(codec: Codec) -> tuple[int, int, int, int]:
    """Return the kind of number, dimensions, bits per code, and dimensions per scale.

    Raises:
        TypeError: only the codec's own decode can read it.
    """
    layout = codec.layout
    if isinstance(layout, BitLayout):
        return 0, layout.dim, layout.bits, layout.group
    if not isinstance(codec, RawCodec):
        raise TypeError(f"{codec!r} has no layout")
    return NUMBERS[codec.dtype], codec.dim, 0, 1


class KernelLayout(NamedTuple):
    """A layout in numbers, or the reason why compiled kernels do not support it.

    Attributes:
        declined: The reason, or None.
        formats: For keys, then values: the kind of number (0: integer codes, else one of
            `NUMBERS`), dimensions, bits per code, and dimensions per scale.
        places: Tokens per page, then the byte offsets of codes (or numbers) and metadata of keys,
            then those of values.
        positions: Byte offset of the positions, whether the layout has any or not.
    """

    declined: str | None
    formats: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    positions: int = -1


def described(layout: PageLayout) -> KernelLayout:
    """Return the layout in numbers; cached."""
    try:
        return _described(layout)
    except TypeError:  # an unhashable codec
        return _described.__wrapped__(layout)


@lru_cache(maxsize=256)
def _described(layout: PageLayout) -> KernelLayout:
    key, value = layout.format.key, layout.format.value
    if layout.format.value_in_key:
        return KernelLayout("values that are the first dimensions of their keys")
    for codec in (key, value):
        if not _is_known(codec):
            return KernelLayout(f"{codec!r} is read and written by its own code")
    starts = [offset for offset, _, _ in layout.segments]
    split = len(key.parts)
    offsets = [start for half in (starts[:split], starts[split:]) for start in (*half, 0)[:2]]
    formats = (*_code_numbers(key), *_code_numbers(value))
    return KernelLayout(None, formats, (layout.tokens, *offsets), layout.position_offset)
