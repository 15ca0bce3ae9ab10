"""Torch's fused attention kernel for CPUs, for passes with many queries."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_attention.partial import Partial
from kv_attention.parts import DensePart, PagedPart, block_sizes


def is_causal(q: Float[Tensor, "B H G L D"], position: Int[Tensor, "B L"], part: DensePart) -> bool:
    """Whether query i sees exactly the keys j <= i, and the kernel supports these tensors."""
    key, value, place = part.tokens.key, part.tokens.value, part.tokens.position
    if (
        q.device.type != "cpu"
        or position.shape[1] == 1  # synchronizing would cost more than it saves
        or key.shape != value.shape
        or not q.dtype == key.dtype == value.dtype
        or not q.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        or position.shape != place.shape
    ):
        return False
    before = position.cummax(dim=1).values[:, :-1]
    ascending = (position[:, 1:] < 0) | (position[:, 1:] > before)
    return torch.equal(position, place) and bool(ascending.all())


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
    return _fused(q, key.flatten(0, 1), value.flatten(0, 1), hidden, True, scale)


def comes_before(
    q: Float[Tensor, "B H G L D"], position: Int[Tensor, "B L"], part: DensePart
) -> bool:
    """Whether every query sees every token, and the kernel supports these tensors."""
    key, value, place = part.tokens.key, part.tokens.value, part.tokens.position
    if (
        q.device.type != "cpu"
        or position.shape[1] == 1  # synchronizing would cost more than it saves
        or key.shape[-1] != value.shape[-1]
        or not q.dtype == key.dtype == value.dtype
        or not q.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    ):
        return False
    last = torch.iinfo(position.dtype).max
    first = position.masked_fill(position < 0, last).amin(dim=1)
    return bool((place.amax(dim=1) <= first).all())


def before(q: Float[Tensor, "B H G L D"], part: DensePart, scale: float) -> Partial:
    """Compute attention over dense tokens that every query sees; the output is as in `causal`."""
    key, value = part.tokens.key, part.tokens.value
    if part.full:
        return _fused(q, key.flatten(0, 1), value.flatten(0, 1), None, False, scale)
    empty = part.tokens.position < 0
    key = key.masked_fill(empty[:, None, :, None], 0)
    value = value.masked_fill(empty[:, None, :, None], 0)
    hidden = empty.repeat_interleave(q.shape[1], dim=0)
    found = _fused(q, key.flatten(0, 1), value.flatten(0, 1), hidden, False, scale)
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
        found = _fused(q, key.rows, value.rows, hidden, False, 1.0)
        if seen is not None:  # the kernel's log-sum-exp of no token is not -inf
            some = held.any(dim=-1)[..., None, None]
            found = Partial(found.out, found.lse.where(some, -torch.inf))
        total = total + found
    return total


def _fused(
    q: Float[Tensor, "B H G L D"],
    key: Float[Tensor, "R S D"],
    value: Float[Tensor, "R S D"],
    hidden: Bool[Tensor, "R S"] | None,
    causal: bool,
    scale: float,
) -> Partial:
    group, length = q.shape[2:4]
    bias = None
    if hidden is not None:
        bias = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -torch.inf)
        bias = bias[:, None, None].expand(-1, 1, length, -1)
    # The query heads of a group share their key by a stride of 0, without a copy.
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.flatten(0, 1),
        key[:, None].expand(-1, group, -1, -1),
        value[:, None].expand(-1, group, -1, -1),
        0.0,
        causal,
        attn_mask=bias,
        scale=scale,
    )
    return Partial(out.view(q.shape), lse.view(q.shape[:-1]))
