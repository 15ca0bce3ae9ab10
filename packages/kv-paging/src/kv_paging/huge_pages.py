"""Huge pages of the operating system for memory that is read in random order."""

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Final

from jaxtyping import UInt8
from torch import Tensor

HUGE: Final = 2 << 20  # bytes of a huge page
_ADVISE: Final = 14  # MADV_HUGEPAGE


def back_with_huge_pages(data: UInt8[Tensor, "..."]) -> bool:
    """Ask Linux to back memory that was not written to with huge pages; return whether it agreed.

    A decode step reads pages in random order, and an address in a page of 4 KiB is translated anew
    each time. The request is not made for other devices and systems, and has no effect where huge
    pages are disabled. It changes no byte.

    Args:
        data: a contiguous tensor; what is smaller than a huge page is left as it is.
    """
    if data.device.type != "cpu" or not sys.platform.startswith("linux"):
        return False
    first = -(-data.data_ptr() // HUGE) * HUGE
    size = (data.data_ptr() + data.nbytes - first) // HUGE * HUGE
    return size > 0 and _madvise()(first, size, _ADVISE) == 0


@cache
def _madvise() -> Callable[[int, int, int], int]:
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call
