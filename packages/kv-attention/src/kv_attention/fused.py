"""Torch's fused attention kernels that also give the log-sum-exp, and which tensors they take."""

from typing import Final, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

from kv_attention.partial import Partial

Kernel: TypeAlias = Literal["cpu", "flash", "efficient"]
WIDEST_FLASH: Final = 256  # dimensions of a head
_ATEN: Final = torch.ops.aten
_HALVES: Final = (torch.float16, torch.bfloat16)
_BYTES: Final = 16  # alignment of vectors
_LANES: Final = 16  # columns of a bias, a multiple of which its rows are apart


def fused_kernel(
    q: Float[Tensor, "B H G L D"],
    key: Float[Tensor, "B H S D"],
    value: Float[Tensor, "B H S Dv"],
    *,
    masked: bool,
) -> Kernel | None:
    """Return the kernel that takes these tensors, with a mask of keys or without, if there is one.

    It neither reads tensors nor waits for the device.
    """
    adjacent = q.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    if not adjacent or not q.dtype == key.dtype == value.dtype:
        return None
    dims = key.shape[-1], value.shape[-1]
    if q.device.type == "cpu":
        return "cpu" if dims[0] == dims[1] else None
    # The log-sum-exp of AMD's kernels is laid out differently.
    if q.device.type != "cuda" or torch.version.hip is not None:
        return None
    rows = q.flatten(0, 1)
    keys, values = (x.flatten(0, 1)[:, None].expand(-1, q.shape[2], -1, -1) for x in (key, value))
    given = SDPAParams(rows, keys, values, None, 0.0, False, False)
    for name in kernels_on_cuda(q.dtype, dims, masked=masked):
        # Torch knows the card, and what its user has disabled.
        takes = can_use_flash_attention if name == "flash" else can_use_efficient_attention
        if takes(given):
            return name
    return None


def kernels_on_cuda(
    dtype: torch.dtype, dims: tuple[int, int], *, masked: bool
) -> tuple[Literal["flash", "efficient"], ...]:
    """Return the kernels for GPUs that take vectors of a dtype and of these sizes, fastest first.

    FlashAttention (Dao 2023) takes float16 and bfloat16, keys and values of the same dimensions, a
    multiple of 8 of at most 256, and no mask. The memory-efficient kernel (Rabe and Staats 2021, as
    in xFormers) takes masks, float32, and any dimensions that are a multiple of 16 bytes.
    """
    if dtype not in (*_HALVES, torch.float32) or any(dim * dtype.itemsize % _BYTES for dim in dims):
        return ()
    flash = dtype in _HALVES and dims[0] == dims[1] <= WIDEST_FLASH and not masked
    return ("flash", "efficient") if flash else ("efficient",)


def attend_fused(
    kernel: Kernel,
    q: Float[Tensor, "B H G L D"],
    key: Float[Tensor, "R S D"],
    value: Float[Tensor, "R S Dv"],
    hidden: Bool[Tensor, "R S"] | None,
    scale: float,
    *,
    causal: bool,
) -> Partial:
    """Compute attention by a kernel that takes these tensors; the output is in the dtype of `q`.

    `hidden` marks keys that no query sees; the result of a query that sees no key is undefined.
    With `causal`, query i sees the keys j <= i.
    """
    group, length = q.shape[2:4]
    rows = q.flatten(0, 1)
    # The query heads of a group share their key by a stride of 0, without a copy.
    keys, values = (x[:, None].expand(-1, group, -1, -1) for x in (key, value))
    bias = None if hidden is None else _bias(hidden, q.dtype).expand(-1, group, length, -1)
    if kernel == "cpu":
        bias = None if bias is None else bias[:, :1]
        out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            rows, keys, values, 0.0, causal, attn_mask=bias, scale=scale
        )
    else:
        rows, keys, values = _aligned(rows), _aligned(keys), _aligned(values)
        if kernel == "flash":
            out, lse, *_ = _ATEN._scaled_dot_product_flash_attention(
                rows, keys, values, 0.0, causal, scale=scale
            )
        else:
            out, lse, *_ = _ATEN._scaled_dot_product_efficient_attention(
                rows, keys, values, bias, True, 0.0, causal, scale=scale
            )
            lse = lse[..., :length]  # padded to a multiple of 32 queries
    return Partial(out.unflatten(0, q.shape[:2]), lse.unflatten(0, q.shape[:2]))


def _bias(hidden: Bool[Tensor, "R S"], dtype: torch.dtype) -> Float[Tensor, "R 1 1 S"]:
    """Return -inf where no query sees a key, else 0, in rows that suit aligned loads."""
    count = hidden.shape[1]
    room = hidden.new_zeros((len(hidden), -(-count // _LANES) * _LANES), dtype=dtype)
    return room[:, :count].masked_fill_(hidden, -torch.inf)[:, None, None]


def _aligned(x: Float[Tensor, "R G S D"]) -> Float[Tensor, "R G S D"]:
    """Return a tensor whose vectors begin at multiples of 16 bytes, a copy if they do not.

    A tensor on `meta` has no address.
    """
    strides = (stride * x.itemsize for stride in x.stride()[:-1])
    fits = not any(stride % _BYTES for stride in strides)
    return x if fits and (x.is_meta or x.data_ptr() % _BYTES == 0) else x.contiguous()
