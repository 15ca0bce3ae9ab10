"""What holds of every codec, beside the contract's own checks."""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from kv_policy import Codec


def coded(codec: Codec, x: Float[Tensor, "n b D"]) -> tuple[UInt8[Tensor, "n N"], Tensor]:
    """Encode and decode; the bytes have their declared number, and vectors the shape of `x`."""
    data = codec.encode(x)
    back = codec.decode(data)
    assert data.shape == (len(x), sum(codec.parts))
    assert back.dtype == torch.float32
    assert back.shape == x.shape
    return data, back


def expect_within_bound(codec: Codec, x: Float[Tensor, "n b D"]) -> None:
    """The error of each number is at most its bound, which is infinite where it must be."""
    bound = codec.bound(x)
    error = (codec.decode(codec.encode(x)).double() - x.double()).abs()
    assert bound.shape == x.shape
    assert not bound.isnan().any()
    assert (error <= bound)[~x.isnan()].all()
    assert torch.equal(bound.isinf(), ~x.isfinite())
