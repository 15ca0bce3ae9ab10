"""Huge pages of the operating system for memory that is read in random order."""

import ctypes
import sys
from functools import cache
from typing import Final

from jaxtyping import UInt8
from torch import Tensor

HUGE: Final = 2 << 20  # bytes of a huge page
_ADVISE: Final = 14  # MADV_HUGEPAGE
_COLLAPSE: Final = 25  # MADV_COLLAPSE, Linux 6.1


def back_with_huge_pages(data: UInt8[Tensor, "..."], *, written: bool = False) -> bool:
    """Ask Linux to back a tensor's memory with huge pages; return whether it agreed.

    A step reads pages in random order, and an address in a page of 4 KiB is translated anew each
    time. The request has no effect where huge pages are disabled, and none on a GPU.

    Args:
        data: a contiguous tensor; what is smaller than a huge page is left as it is.
        written: whether the memory was written to: its pages are then replaced, which copies them.
    """
    first = -(-data.data_ptr() // HUGE) * HUGE
    size = (data.data_ptr() + data.nbytes - first) // HUGE * HUGE
    if data.is_cuda or size <= 0 or not sys.platform.startswith("linux"):
        return False
    asked = _madvise()(first, size, _ADVISE) == 0
    return asked and (not written or _madvise()(first, size, _COLLAPSE) == 0)


@cache
def _madvise() -> "ctypes._NamedFuncPointer":
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call
