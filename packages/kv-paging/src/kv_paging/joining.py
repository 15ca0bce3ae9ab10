"""Sequences that come and go as a whole: two sets of stores become one, or one becomes empty."""

from collections.abc import Sequence

import torch

from kv_paging.streams import Streams


def join_all(mine: Sequence[Streams], theirs: Sequence[Streams]) -> None:
    """Let their sequences come after mine in every layer, store by store; they have none then.

    Pages change their owner and nothing else: no byte of one moves, and nothing waits for the
    device. What costs time are the page tables, which are laid side by side.

    Raises:
        ValueError: what `expect_joined` refuses; nothing has changed.
    """
    expect_joined(mine, theirs)
    for store, other in zip(mine, theirs, strict=True):
        store._join(other)


def expect_joined(mine: Sequence[Streams], theirs: Sequence[Streams]) -> None:
    """Refuse stores whose sequences cannot become sequences of others.

    Raises:
        ValueError: the same stores, another pool, other layouts, or other layers or heads.
    """
    if len(mine) != len(theirs):
        raise ValueError(
            f"{len(theirs)} stores cannot join {len(mine)}; both sides need the same tiers"
        )
    for store, other in zip(mine, theirs, strict=True):
        if store is other:
            raise ValueError("sequences cannot join themselves; name other tiers over the pool")
        if store.pool is not other.pool:
            raise ValueError(
                "the pages lie in two pools, and joining copies none; make both over one pool"
            )
        if type(store) is not type(other) or store.layout != other.layout:
            raise ValueError(
                f"pages laid out as {other.layout} cannot join pages laid out as {store.layout}; "
                "both sides must be laid out alike"
            )
        (layers, _, heads), (others, _, more) = store.length.shape, other.length.shape
        if (layers, heads) != (others, more):
            raise ValueError(
                f"{others} layers of {more} heads cannot join {layers} layers of {heads} heads; "
                "both sides need the same"
            )


def expect_some(stores: Sequence[Streams]) -> None:
    """Refuse to go on where there is no sequence.

    Raises:
        ValueError: all were released, or have joined others.
    """
    if not stores[0].length.shape[1]:
        raise ValueError(
            "no sequence is left here: all were released, or have joined others; go on with those, "
            "or let new ones join"
        )


def release_all(stores: Sequence[Streams]) -> None:
    """Let all sequences of stores over one pool go; their pages are free, and no sequence is left.

    The host waits for the device once.
    """
    held = [store.held_pages() for store in stores]
    for store, count, total in zip(
        stores, held, torch.stack([each.sum() for each in held]).tolist(), strict=True
    ):
        store.pool.release(store.page_table.within(count, total))
    for store in stores:
        store._empty()
