"""Codes of the keys in pages, as `kv_policy.key_codes` defines them."""

from typing import Final

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from kv_policy.key_codes import BITS, DIMS, LEVELS, code_rotation, code_rows

MOST: Final = 65504.0  # of a scale, the largest float16
LIMIT: Final = 32752.0  # of an element, as in formats; NaN is 0


def codes_of(key: Float[Tensor, "S L D"], held: Bool[Tensor, "S L"]) -> UInt8[Tensor, "S _"]:
    """Return the codes of the keys of each page: `code_bytes(D, L)` bytes.

    An empty slot has those of the first key in its page; a page without a key has scales of 0.

    Args:
        key: the keys of a page each, not rotated.
        held: which slots have a key.
    """
    pages, tokens, dim = key.shape
    first = held.int().argmax(1)
    lone = key.gather(1, first[:, None, None].expand(-1, 1, dim))
    key = torch.where(held[..., None], key, lone).float().nan_to_num(0.0).clamp(-LIMIT, LIMIT)
    x = key @ code_rotation(dim, key.device)
    size = x.square().mean(-1, keepdim=True).sqrt()
    codes = (x / size.masked_fill(size == 0, torch.inf) + LEVELS // 2).floor()
    codes = codes.clamp(0, LEVELS - 1)
    product = (x * (2 * codes - (LEVELS - 1))).sum(-1)
    scale = x.square().sum(-1) / product.masked_fill(product == 0, torch.inf)
    scale = scale.masked_fill(~held.any(1, keepdim=True), 0).clamp(max=MOST).half()
    rows = code_rows(dim)
    padded = torch.nn.functional.pad(codes.to(torch.uint8), (0, rows * DIMS - dim))
    four = padded.view(pages, tokens, rows, 8 // BITS, DIMS * BITS // 8)
    packed = four[:, :, :, 0].clone()
    for plane in range(1, 8 // BITS):
        packed |= four[:, :, :, plane] << (BITS * plane)
    return torch.cat((packed.transpose(1, 2).flatten(1), scale.view(torch.uint8)), 1)
