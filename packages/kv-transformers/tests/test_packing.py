"""The layout of values and outputs between folded projections follows the ranks."""

import pytest
import torch

from kv_transformers.folded import Packing

GROUP, DIM, WIDTH = 2, 8, 6


@pytest.mark.parametrize("rank", [(4, 4, 4), (6, 6, 6), (3, 6, 1), (6, 2, 2)])
def test_packed_heads_lie_side_by_side_without_what_they_do_not_keep(rank: tuple[int, ...]) -> None:
    packing = Packing.of(rank, WIDTH, DIM, GROUP, True, torch.device("cpu"))
    values = [torch.randn(2, 5, r) for r in rank]
    flat = torch.cat(values, dim=-1)
    room = -(-flat.shape[-1] // DIM) * DIM
    viewed = torch.full((2, 5, room), torch.nan)
    viewed[..., : flat.shape[-1]] = flat
    found = packing.unpack(viewed.unflatten(2, (-1, DIM)).transpose(1, 2))
    assert found.shape == (2, len(rank), 5, WIDTH)
    out = torch.full((2, len(rank), GROUP, 5, WIDTH), torch.nan)
    for head, (r, value) in enumerate(zip(rank, values, strict=True)):
        assert torch.equal(found[:, head, :, :r], value)
        assert not found[:, head, :, r:].any()
        out[:, head, :, :, :r] = value[:, None] * torch.arange(1, GROUP + 1)[:, None, None]
    by_query = [value * g for value in values for g in range(1, GROUP + 1)]
    assert torch.equal(packing.pack(out), torch.cat(by_query, dim=-1))
