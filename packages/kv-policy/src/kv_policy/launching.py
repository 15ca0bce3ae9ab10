"""Launches of Triton kernels: on which device, and by what numbers they are not compiled again.

Triton compiles a kernel again for a number that is 1, or is or is not a multiple of 16, and for an
address that is or is not one. What varies from step to step is in the kernel's `do_not_specialize`
or `do_not_specialize_on_alignment`. These do not reach into tuples, so numbers there are multiples
of `UNIT`.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch
from torch import Tensor

UNIT: Final = 16


def launching_on(x: Tensor) -> AbstractContextManager[object]:
    """Return a context that launches kernels on the device of a tensor.

    Triton launches on torch's current device, which is the first one unless it is changed. Every
    launch is inside such a context.
    """
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def strides_of(x: Tensor) -> tuple[int, ...]:
    """Return the strides of vectors, the last dimension, in a form that suits any number of them.

    Those of vectors whose length is a multiple of `UNIT` are such multiples, too, which loads of
    several elements at once rely on. Others may or may not be, by the number of tokens, so all but
    the last are multiplied by `UNIT`, and kernels divide by it. A dimension of size 1 has any
    stride; here it is 0, or 1 if it is the last.

    >>> strides_of(torch.empty(2, 3, 32)), strides_of(torch.empty(1, 3, 5))
    ((96, 32, 1), (0, 80, 1))
    """
    unit = UNIT if x.shape[-1] % UNIT else 1
    lead = zip(x.shape[:-1], x.stride(), strict=False)
    last = x.stride(-1) if x.shape[-1] > 1 else 1
    return (*(0 if size == 1 else unit * stride for size, stride in lead), last)


def base_of(x: Tensor) -> tuple[Tensor, int]:
    """Return the start of a tensor's storage, and the tensor's offset in it times `UNIT`.

    A storage starts at a multiple of `UNIT` bytes, so any tensor suits one compiled kernel, in
    tuples, too.
    """
    return x.as_strided((1,), (1,), 0), UNIT * int(x.storage_offset())
