"""The assignment of a decode step's tiles to programs."""

from typing import no_type_check

import pytest
import torch
import triton
import triton.language as tl

from kv_attention.gpu.decode import plan_kernel, table_row_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH = [0, 5, 8, 0, 1, 17, 9, 0, 0, 3, 0]  # tokens; the first and the last table rows are empty
BLOCK = 8


@triton.jit
@no_type_check
def asking(ends, table_rows, found, WIDE: tl.constexpr):
    """Look up the table row of the tile with the program's number."""
    tile = tl.program_id(0)
    tl.store(found + tile, table_row_of(ends, table_rows, tile, WIDE))


@pytest.mark.parametrize("wide", [1, 4, 16])
def test_every_tile_is_of_its_table_row(wide):
    length = torch.tensor(LENGTH, dtype=torch.int32, device=DEVICE)
    ends = torch.full_like(length, -1)
    plan_kernel[(1,)](length, ends, len(length), len(ends), BLOCK=BLOCK, WIDE=wide)
    tiles = [-(-tokens // BLOCK) for tokens in LENGTH]
    assert ends.tolist() == torch.tensor(tiles).cumsum(0).tolist()
    found = torch.full((sum(tiles),), -1, dtype=torch.int32, device=DEVICE)
    asking[(sum(tiles),)](ends, len(length), found, WIDE=wide)
    assert found.tolist() == [r for r, count in enumerate(tiles) for _ in range(count)]
