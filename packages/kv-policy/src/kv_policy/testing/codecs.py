"""The laws of a codec."""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from kv_policy.bit_layout import BitLayout, PlaneLayout
from kv_policy.codec import Codec
from kv_policy.testing.laws import equal, law, works

_BLOCKS = 12


def check_codec(codec: Codec) -> None:
    """Check a codec against the contract.

    Blocks take exactly `sum(parts)` bytes; decoded vectors are within `bound`; a block's bytes
    depend on that block alone, whatever the others hold, infinities and NaN included; an empty
    batch works; decoding accepts any memory layout of the bytes; and `layout`, if not None,
    describes the bytes fully.

    Raises:
        AssertionError: a law is violated; the message names it.
    """
    law(isinstance(codec, Codec), f"{codec!r} lacks a member of the Codec protocol")
    law(codec.dim >= 1 and codec.block >= 1, "dim and block must be at least 1")
    law(
        len(codec.parts) > 0 and all(part >= 0 for part in codec.parts),
        f"parts is {codec.parts}; it must list the bytes of at least one part",
    )
    inputs = _inputs(codec)
    for kind, x in inputs.items():
        _check_batch(codec, kind, x)
    _check_empty(codec, inputs["normal"][:0])
    _check_leaks(codec, inputs["normal"])
    _check_views(codec, inputs["normal"])


def _inputs(codec: Codec) -> dict[str, Float[Tensor, "n S D"]]:
    generator = torch.Generator().manual_seed(20)
    normal = torch.randn(_BLOCKS, codec.block, codec.dim, generator=generator)
    level = torch.randn(_BLOCKS, 1, 1, generator=generator)
    ramp = torch.linspace(-1, 1, codec.dim).expand_as(normal)
    spiked = normal.clone()
    spiked[..., -1] *= 200
    return {
        "normal": normal,
        "bfloat16": normal.bfloat16(),
        "float16": normal.half(),
        "constant": level.expand_as(normal),
        "zero": torch.zeros_like(normal),
        "far from zero": normal * 0.01 + 100,
        "one large": spiked,
        "evenly spread": ramp,
        "tiny": normal * 1e-30,
        "subnormal": normal * 1e-42,
        "huge": normal * 1e30,
    }


def _check_batch(codec: Codec, kind: str, x: Float[Tensor, "n S D"]) -> None:
    before = x.clone()
    data = _encode(codec, kind, x)
    law(equal(x, before), f"encode changed its input ({kind} vectors)")
    law(equal(data, codec.encode(x)), f"encode returns other bytes when repeated ({kind} vectors)")
    alone = torch.cat([codec.encode(block[None]) for block in x])
    law(
        equal(data, alone),
        f"a block encoded alone has other bytes than the same block in a batch ({kind} vectors)",
    )
    back = _decode(codec, kind, data)
    law(
        equal(back, torch.cat([codec.decode(row[None]) for row in data])),
        f"bytes decoded alone differ from the same bytes decoded in a batch ({kind} vectors)",
    )
    _check_error(codec, kind, x, back)
    if codec.layout is not None:
        _check_layout(codec, codec.layout, kind, data, back)


def _encode(codec: Codec, kind: str, x: Float[Tensor, "n S D"]) -> UInt8[Tensor, "n N"]:
    data = works(f"encode failed on {kind} vectors", codec.encode, x)
    law(data.dtype == torch.uint8, f"encode returns {data.dtype}; it must return uint8")
    expected = (x.shape[0], sum(codec.parts))
    law(
        tuple(data.shape) == expected,
        f"{kind} vectors of shape {tuple(x.shape)} became bytes of shape {tuple(data.shape)}; "
        f"parts {codec.parts} promise {expected}",
    )
    return data


def _decode(codec: Codec, kind: str, data: UInt8[Tensor, "n N"]) -> Float[Tensor, "n S D"]:
    back = works(f"decode failed on the bytes of {kind} vectors", codec.decode, data)
    expected = (data.shape[0], codec.block, codec.dim)
    law(
        tuple(back.shape) == expected and back.is_floating_point(),
        f"decode returns {back.dtype} of shape {tuple(back.shape)}; expected floats of {expected}",
    )
    return back


def _check_error(
    codec: Codec, kind: str, x: Float[Tensor, "n S D"], back: Float[Tensor, "n S D"]
) -> None:
    bound = works(f"bound failed on {kind} vectors", codec.bound, x)
    law(
        bound.shape == x.shape and bool((bound >= 0).all()),
        f"bound must return a number of at least 0 for every element ({kind} vectors)",
    )
    if kind in ("normal", "constant", "zero"):
        law(
            bool(bound.isfinite().all()),
            f"the bound of {kind} vectors is infinite",
        )
    error = (back.double() - x.double()).abs()
    excess = (error - bound.double()).where(bound.isfinite(), torch.tensor(0.0).double())
    law(
        bool((excess <= 0).all()),
        f"decode(encode(x)) exceeds bound(x) by {excess.nan_to_num(torch.inf).max():.3g} "
        f"for {kind} vectors",
    )


def _check_layout(
    codec: Codec,
    layout: BitLayout | PlaneLayout,
    kind: str,
    data: UInt8[Tensor, "n N"],
    back: Float[Tensor, "n S D"],
) -> None:
    rows, records = codec.block, codec.block // layout.tokens
    parts = rows * layout.stride, records * layout.parts[1]
    law(
        layout.dim == codec.dim and rows % layout.tokens == 0 and codec.parts == parts,
        f"the layout has {layout.dim} dimensions, {layout.tokens} tokens that share scales and "
        f"parts {parts}; the codec has {codec.dim}, blocks of {rows} and parts {codec.parts}",
    )
    dims = torch.arange(codec.dim)
    packed = data[:, : parts[0]].view(len(data), rows, layout.stride)
    codes, start, low = torch.zeros(len(data), rows, codec.dim, dtype=torch.int32), 0, 0
    planes = layout.each if isinstance(layout, PlaneLayout) else (layout,)
    for plane in planes:
        byte, bit = dims % plane.stride, plane.bits * (dims // plane.stride)
        codes += ((packed[..., start + byte].int() >> bit) & (2**plane.bits - 1)) << low
        start, low = start + plane.stride, low + plane.bits
    given = layout.levels if isinstance(layout, PlaneLayout) else ()
    levels = torch.tensor(given, dtype=torch.float32)
    meta = data[:, parts[0] :].clone().view(torch.float16).float().view(len(data), records, -1)
    meta = meta.repeat_interleave(layout.tokens, dim=1)
    group = dims // layout.group
    product = (levels[codes] if given else codes.float()) * meta[..., group]
    zero = torch.zeros(()) if given else meta[..., layout.groups + group]
    formula = "level * scale" if given else "code * scale + zero"
    slack = 2**-22 * (product.abs() + zero.abs())  # fused or not
    law(
        bool(((product + zero - back.float()).abs() <= slack).all()),
        f"decode does not return {formula} of its own layout ({kind} vectors)",
    )


def _check_empty(codec: Codec, nothing: Float[Tensor, "0 S D"]) -> None:
    _decode(codec, "no", _encode(codec, "no", nothing))


def _check_leaks(codec: Codec, x: Float[Tensor, "n S D"]) -> None:
    odd = x.clone()
    odd[1, 0, 0] = torch.nan
    odd[4, -1, -1] = torch.inf
    odd[7] = -torch.inf
    clean = torch.ones(len(x), dtype=torch.bool)
    clean[[1, 4, 7]] = False
    data, expected = _encode(codec, "infinite and NaN", odd), codec.encode(x)
    law(
        equal(data[clean], expected[clean]),
        "an infinity or a NaN in one block changes the bytes of another block",
    )
    back = _decode(codec, "infinite and NaN", data)
    law(
        equal(back[clean], codec.decode(expected)[clean]),
        "an infinity or a NaN in one block changes the decoded vectors of another block",
    )


def _check_views(codec: Codec, x: Float[Tensor, "n S D"]) -> None:
    data = codec.encode(x)
    spread = torch.stack([x, -x], dim=-1).flatten(-2)[..., ::2]
    law(
        equal(data, works("encode failed on strided vectors", codec.encode, spread)),
        "encode returns other bytes for the same vectors with other strides",
    )
    page = torch.zeros(len(x), data.shape[1] + 3, dtype=torch.uint8)
    page[:, 1 : 1 + data.shape[1]] = data
    for rows in (page, page[:1]):
        inside = rows[:, 1 : 1 + data.shape[1]]
        back = works("decode failed on bytes inside a page", codec.decode, inside)
        law(
            equal(back, codec.decode(data[: len(rows)])),
            "decode returns other vectors for the same bytes inside a page",
        )
