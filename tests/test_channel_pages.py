"""Keys per channel in pages: blocks hold what the codec says, however their tokens came."""

import pytest
import torch
from torch import Tensor

from kv_paging import PagePool, Tiers, fit
from kv_policy import CacheShape, RawCodec, TokenFormat, read_formats

SHAPE = CacheShape(layers=2, kv_heads=2, group=1, key_dim=16, value_dim=16, dtype=torch.float32)
RAW = TokenFormat(RawCodec(16, torch.float32), RawCodec(16, torch.float32))
BOTH = frozenset({"keys", "values"})


def tiers(name: str) -> Tiers:
    layouts = fit(read_formats(name).bind(SHAPE), 64, True, True)
    return Tiers(PagePool(layouts[0].nbytes, poison=True), layouts, 2, 1, 2, raw=RAW)


def append(cache: Tiers, key: Tensor, value: Tensor, keep: Tensor, start: int) -> None:
    position = torch.arange(start, start + keep.shape[1]).expand(keep.shape)
    cache.append(0, cache.table_rows(), key, value, keep, position.float() % 7, position)


@pytest.mark.parametrize("name", ["k4v4:keys=channel", "k8v4:keys=channel", "k2v2:keys=channel"])
@pytest.mark.parametrize("steps", [7, 40])
def test_blocks_are_encoded_once_and_exactly_as_the_codec_does(name: str, steps: int) -> None:
    cache, length = tiers(name), 120
    blocks, waiting = cache.stores
    block = blocks.layout.format.block
    assert block > 1
    key, value = torch.randn(2, 4, length, 16)
    key[..., 3] *= 50  # a large channel, for which keys are encoded per channel
    keep = torch.rand(4, length) < torch.tensor([0.2, 0.5, 0.9, 1])[:, None]
    for start in range(0, length, steps):
        part = slice(start, start + steps)
        append(cache, key[:, part], value[:, part], keep[:, part], start)
    assert torch.equal(cache.counts().flatten(), keep.sum(1))
    cache.check()
    for layer in range(2):
        full, loose = blocks.read_layer(layer, BOTH), waiting.read_layer(layer, BOTH)
        for head in range(2):
            table_row = 2 * layer + head
            mine = keep[table_row]
            cut = int(mine.sum()) // block * block
            for kind, codec, x in (
                ("key", blocks.layout.format.key, key[table_row, mine]),
                ("value", blocks.layout.format.value, value[table_row, mine]),
            ):
                whole = codec.decode(codec.encode(x[:cut].view(-1, block, 16))).view(-1, 16)
                assert torch.equal(getattr(full, kind)[head][full.held[head]], whole)
                assert torch.equal(getattr(loose, kind)[head][loose.held[head]], x[cut:])


def test_a_block_keeps_its_bytes_while_its_tokens_go() -> None:
    cache = tiers("k4v4:keys=channel")
    blocks = cache.stores[0]
    block = blocks.layout.format.block
    key, value = torch.randn(2, 4, 3 * block, 16)
    append(cache, key, value, torch.ones(4, 3 * block, dtype=torch.bool), 0)
    before = blocks.read(cache.table_rows(), BOTH)
    stay = torch.rand(before.held.shape) < 0.3
    stay[:, block : 2 * block] = False  # the last block moves into the place of this one
    blocks.compact(cache.table_rows(), stay)
    assert blocks.length.flatten().tolist() == [2 * block] * 4
    assert torch.equal(cache.counts().flatten(), stay.sum(1))
    after = blocks.read(cache.table_rows(), BOTH)
    for name in ("key", "value", "score", "position"):
        old, new = getattr(before, name), getattr(after, name)
        for table_row in range(4):
            assert torch.equal(
                new[table_row, after.held[table_row]], old[table_row, stay[table_row]]
            )
    cache.check()
