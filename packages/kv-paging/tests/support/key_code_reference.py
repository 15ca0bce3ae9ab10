"""Codes of keys decoded by their definition, one at a time."""

import struct

import torch
from torch import Tensor

from kv_policy.key_codes import code_bytes, code_rotation


def rotated(key: Tensor) -> Tensor:
    """Rotate keys in float64."""
    return key.double() @ code_rotation(key.shape[-1], torch.device("cpu")).double()


def codes_in(page: Tensor, tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return the codes of each key in a page, and their scales."""
    data, rows = bytes(page.tolist()), -(-dim // 16)
    assert len(data) == code_bytes(dim, tokens)
    codes = [
        [data[4 * (d // 16 * tokens + t) + d % 4] >> 2 * (d % 16 // 4) & 3 for d in range(dim)]
        for t in range(tokens)
    ]
    scales = struct.unpack(f"<{tokens}e", data[4 * rows * tokens :])
    return torch.tensor(codes), torch.tensor(scales, dtype=torch.float64)


def check_codes(page: Tensor, key: Tensor) -> None:
    """Compare the codes in a page with its keys [tokens, D], none of which is empty."""
    tokens, dim = key.shape
    codes, scales = codes_in(page, tokens, dim)
    x = rotated(key.nan_to_num(0.0).clamp(-32752, 32752))
    size = x.square().mean(-1, keepdim=True).sqrt()
    place = x / size.clamp(min=1e-300) + 2
    near = (place - place.round()).abs() < 1e-4  # either code is right
    expected = place.floor().clamp(0, 3).long()
    assert ((codes == expected) | near | (size < 1e-6)).all()
    level = 2 * codes.double() - 3
    mine = (level * scales[:, None] * x).sum(-1)
    assert ((mine - x.square().sum(-1)).abs() <= 1e-3 * x.square().sum(-1) + 1e-6).all()
