"""Stores of tokens whose value is the first dimensions of their key: one vector a token."""

import pytest
import torch

from kv_paging import BOTH, PagePool, TokenStore
from kv_paging.kernels import declined
from kv_paging.reference import ReferenceStore, stored
from kv_policy import PageLayout, RawCodec, TokenFormat
from kv_quant.integer import IntegerCodec

DIM, PREFIX = 7, 5


def made(form: TokenFormat) -> tuple[TokenStore, ReferenceStore]:
    layout = PageLayout.sized(form, 4, scores=True, positions=True)
    pool = PagePool(layout.nbytes, grows=True, poison=True)
    return TokenStore(pool, layout, 2, 2, 2), ReferenceStore(layout, 2, 2, 2)


@pytest.mark.parametrize("codec", [RawCodec(DIM, torch.float32), IntegerCodec(DIM, 4, 3)])
def test_a_store_reads_values_from_keys(codec) -> None:
    form = TokenFormat(codec, codec).values_in_keys(PREFIX)
    assert form.nbytes == sum(codec.parts)
    (store, slow), generator = made(form), torch.Generator().manual_seed(1)
    rows = store.table_rows()
    key = torch.randn(len(rows), 9, DIM, generator=generator)
    keep = torch.rand(len(rows), 9, generator=generator) < 0.7
    score = torch.rand(len(rows), 9, generator=generator)
    place = torch.arange(9).expand(len(rows), -1)
    for each in (store, slow):
        each.append(rows, key, key[..., :PREFIX], keep, score, place)
    assert stored(store) == slow.tokens
    assert store.pages_used == slow.pages
    for vectors in (BOTH, frozenset({"values"})):
        read = store.read(rows, vectors)
        want = codec.decode(codec.encode(key.flatten(0, 1)[:, None]))[:, 0].view(key.shape)
        assert read.value is not None
        assert torch.equal(read.value[read.held], want[keep][:, :PREFIX].to(read.value.dtype))
    stay = torch.rand(len(rows), 9, generator=generator) < 0.5
    for each in (store, slow):
        each.compact(rows, stay)
    assert stored(store) == slow.tokens
    slot = (store.length.flatten().long() - 1).clamp(max=0)
    fresh = torch.randn(len(rows), DIM, generator=generator)
    for each in (store, slow):
        each.replace(rows, slot, fresh, fresh[:, :PREFIX], score[:, 0], place[:, 0])
    assert stored(store) == slow.tokens
    one = store.fetch(rows, slot)
    assert one.key is not None
    assert one.value is not None
    assert torch.equal(one.value, one.key[..., :PREFIX])


def test_kernels_that_read_values_apart_decline() -> None:
    form = TokenFormat(RawCodec(DIM, torch.float32), RawCodec(DIM, torch.float32))
    layout = PageLayout.sized(form.values_in_keys(PREFIX), 4)
    assert declined("torch", layout, torch.device("cpu")) is None
    for name in ("triton", "cpu"):
        reason = declined(name, layout, torch.device("cpu"))
        assert reason is not None
