"""Torch's fused attention kernels, for passes with many queries."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_attention.fused import Kernel, attend_fused, fused_kernel
from kv_attention.partial import Partial
from kv_attention.parts import DensePart, PagedPart, block_sizes
from kv_attention.tokens import DenseTokens


def is_causal(q: Float[Tensor, "B H G L D"], position: Int[Tensor, "B L"], part: DensePart) -> bool:
    """Whether query i sees exactly the keys j <= i, and a kernel supports these tensors.

    It waits for the device unless the positions are the same tensor, see `surely_causal`.
    """
    place = part.tokens.position
    if (
        position.shape[1] == 1  # synchronizing would cost more than it saves
        or position.shape != place.shape
        or _kernel(q, part) is None
    ):
        return False
    if place is position and part.full:
        return True
    before = position.cummax(dim=1).values[:, :-1]
    ascending = (position[:, 1:] < 0) | (position[:, 1:] > before)
    return bool((position == place).all() & ascending.all())


def surely_causal(position: Int[Tensor, "B L"], tokens: DenseTokens) -> bool:
    """Whether query i is known to see exactly the keys j <= i, without reading a tensor.

    The queries are those of the tokens if the positions are the same tensor; without padding, these
    ascend.
    """
    return tokens.position is position and tokens.full is True and position.shape[1] > 1


def causal(q: Float[Tensor, "B H G L D"], part: DensePart, scale: float) -> Partial:
    """Compute attention over the new chunk; rows of padding queries are undefined.

    The output is in the dtype of the queries.
    """
    key, value, hidden = part.tokens.key, part.tokens.value, None
    if not part.full:
        # A masked key has weight 0, but 0 times NaN is NaN: zero its key and value too.
        empty = part.tokens.position < 0
        key = key.masked_fill(empty[:, None, :, None], 0)
        value = value.masked_fill(empty[:, None, :, None], 0)
        hidden = empty.repeat_interleave(q.shape[1], dim=0)
    kernel = _supported(q, part)
    keys, values = key.flatten(0, 1), value.flatten(0, 1)
    return attend_fused(kernel, q, keys, values, hidden, scale, causal=True)


def comes_before(
    q: Float[Tensor, "B H G L D"], position: Int[Tensor, "B L"], part: DensePart
) -> bool:
    """Whether every query sees every token, and a kernel supports these tensors.

    It waits for the device.
    """
    if position.shape[1] == 1 or _kernel(q, part) is None:
        return False  # for one query, synchronizing would cost more than it saves
    last = torch.iinfo(position.dtype).max
    first = position.masked_fill(position < 0, last).amin(dim=1)
    return bool((part.tokens.position.amax(dim=1) <= first).all())


def before(q: Float[Tensor, "B H G L D"], part: DensePart, scale: float) -> Partial:
    """Compute attention over dense tokens that every query sees; the output is as in `causal`."""
    key, value, kernel = part.tokens.key, part.tokens.value, _supported(q, part)
    if part.full:
        keys, values = key.flatten(0, 1), value.flatten(0, 1)
        return attend_fused(kernel, q, keys, values, None, scale, causal=False)
    empty = part.tokens.position < 0
    key = key.masked_fill(empty[:, None, :, None], 0)
    value = value.masked_fill(empty[:, None, :, None], 0)
    hidden = empty.repeat_interleave(q.shape[1], dim=0)
    keys, values = key.flatten(0, 1), value.flatten(0, 1)
    found = attend_fused(kernel, q, keys, values, hidden, scale, causal=False)
    # The kernel's log-sum-exp of no token is not -inf, and its output may be NaN.
    some = (~empty).any(dim=1)[:, None, None, None]
    out = found.out.where(some[..., None], 0)
    return Partial(out, found.lse.where(some, -torch.inf))


def is_worth_it(q: Float[Tensor, "B H G L D"], value_dim: int) -> bool:
    """Whether dequantizing stored tokens for the kernel is cheaper than using their codes."""
    return q.device.type == "cpu" and q.shape[2] * q.shape[3] > q.shape[4] == value_dim


def stored(q: Float[Tensor, "B H G L D"], position: Int[Tensor, "B L"], part: PagedPart) -> Partial:
    """Compute attention over stored tokens, dequantized block by block; `q` includes the scale."""
    total = Partial.empty(q, q.shape[-1])
    _, tokens = block_sizes(q, q.shape[-1])
    for at in part.spans(tokens):
        (key, value), hidden = (x.plain() for x in part.both(at)), None
        seen = part.visible(at, position)
        if seen is not None:
            held = seen[:, :, 0]
            hidden = ~held.flatten(0, 1)
            key = key.only(~hidden)
        found = attend_fused("cpu", q, key.rows, value.rows, hidden, 1.0, causal=False)
        if seen is not None:  # the kernel's log-sum-exp of no token is not -inf
            some = held.any(dim=-1)[..., None, None]
            found = Partial(found.out, found.lse.where(some, -torch.inf))
        total = total + found
    return total


def _kernel(q: Float[Tensor, "B H G L D"], part: DensePart) -> Kernel | None:
    return fused_kernel(q, part.tokens.key, part.tokens.value, masked=not part.full)


def _supported(q: Float[Tensor, "B H G L D"], part: DensePart) -> Kernel:
    kernel = _kernel(q, part)
    assert kernel is not None, "the caller has asked"
    return kernel
