"""Beams, repeats and smaller batches: sequences change places, in several stores at once."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from kv_paging.checks import expect_within
from kv_paging.joining import expect_some
from kv_paging.pool import PagePool
from kv_paging.streams import Streams


def select_all(stores: Sequence[Streams], source: Int[Tensor, " B2"]) -> None:
    """Let the sequences become source[0], source[1], ... in all stores over one pool, or in none.

    The stores have the same sequences, and layers and heads of their own. A sequence named for the
    first time keeps its pages, one named again gets copies of them, and one not named gives them
    back. The number of sequences becomes B2.

    Raises:
        PoolExhausted: too few pages for the copies, those given back counted in.
        ValueError: a sequence that does not exist, or none.
    """
    pool, sequences = stores[0].pool, stores[0].length.shape[1]
    if source.numel() == 0:
        raise ValueError("no sequence is selected; name at least one, or release all of them")
    expect_some(stores)
    expect_within("sequence", source, sequences - 1)
    order = torch.arange(source.shape[0], device=source.device)
    again = (source[:, None] == source).int().argmax(1) < order
    gone = torch.ones(sequences, dtype=torch.bool, device=source.device)
    gone[source] = False
    held = [store.held_pages().view(store.length.shape) for store in stores]
    lost = [(each * gone[:, None]).flatten() for each in held]
    copied = [(each[:, source] * again[:, None]).flatten() for each in held]
    known = torch.stack([each.sum() for each in (*lost, *copied)]).tolist()
    back, needed = known[: len(stores)], known[len(stores) :]
    pool.reserve(sum(needed) - sum(back))  # the only step that can fail
    for store, count, total in zip(stores, lost, back, strict=True):
        pool.release(store._table.within(count, total))
    for store in stores:
        rows = store.streams().view(store.length.shape)[:, source].flatten()
        store._reorder(rows, source)
    for store, count, total in zip(stores, copied, needed, strict=True):
        store._copy(count, total)


def move_together(pool: PagePool, stores: Sequence[Streams], free: int) -> None:
    """Shrink a pool whose pages these stores hold until so many are free, and tell their tables.

    Raises:
        ValueError: the pool may not grow.
        RuntimeError: somebody else holds pages of the pool; nothing has changed.
    """
    ids = pool.shrink(torch.cat([store.pages() for store in stores]), free)
    for store in stores:
        if not store.page_table.reverse:  # the right side goes with the left
            store.page_table.rename(ids)
