"""Where a cache holds each token: for every layer, sequence and head, by position."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from kv_paging import TokenStore
from kv_policy import KVPolicy, Part, Raw, TieredFormats
from kv_runtime.batch import Batch
from kv_runtime.cache import PolicyCache
from kv_runtime.window.base import Window

NOWHERE: Final = 255  # where a token is that is not held

Kind: TypeAlias = Literal["tier", "waiting", "window"]


@dataclass(frozen=True, slots=True)
class Place:
    """A way in which tokens are held.

    Attributes:
        name: what it is called, by its format.
        kind: a tier in pages; tokens that wait raw for a block of their tier; or the raw window.
        nbytes: what its tokens take with their scores and positions; a window counts as a whole,
            with slots that are empty.
    """

    name: str
    kind: Kind
    nbytes: int


@dataclass(frozen=True)
class Holding:
    """Where tokens are, after a forward pass.

    Heads are those that are stored: a basis may put several KV heads together.

    Attributes:
        places: the tiers, best first, each before the tokens that wait for its blocks; then the raw
            window, where there is one.
        place: by position, an index into `places`, or NOWHERE where a head does not hold the token
            or the sequence is not as long.
    """

    places: tuple[Place, ...]
    place: UInt8[Tensor, "N B H L"]

    @property
    def held(self) -> Bool[Tensor, "N B H L"]:
        """Which tokens are held at all."""
        return self.place != NOWHERE

    def counts(self) -> Int[Tensor, "P N B H"]:
        """Count the tokens of each place."""
        each = [(self.place == i).sum(-1) for i in range(len(self.places))]
        return torch.stack(each)


def holding(cache: PolicyCache) -> Holding:
    """Look where each token of a cache is; nothing changes, and the host waits for the device.

    Pages say the positions of their tokens wherever a policy selects tokens. Where it keeps every
    token they hold no positions, and need none: tokens lie in their order.

    Args:
        cache: `CompressedCache.runtime`, or a cache of another host, between two forward passes.

    Raises:
        ValueError: the cache holds nothing yet.
    """
    batch = cache.batch
    if batch is None or not len(batch.seen):
        raise ValueError("the cache holds nothing yet; let a model read a prompt over it first")
    places = _places(batch, cache.policy)
    lead = batch.shape.layers, len(batch.seen), batch.shape.kv_heads
    length, table_rows = int(batch.seen.max()), batch.table_rows()
    # The last column takes what belongs to no token.
    found = torch.full(
        (len(table_rows), length + 1), NOWHERE, dtype=torch.uint8, device=table_rows.device
    )
    before = torch.zeros_like(table_rows)  # tokens in earlier stores, where pages hold no positions
    for i, store in enumerate(batch.stores):
        if not store.longest:
            continue
        read = store.read(table_rows)
        position = read.position
        if position is None:
            position = before[:, None] + torch.arange(read.held.shape[1], device=table_rows.device)
            before = before + read.held.sum(1)
        found.scatter_(1, position.long().masked_fill(~read.held, length), i)
    if batch.window is not None:
        position = batch.window.position
        position = position.masked_fill(position < 0, length)
        each = position[None, :, None].expand(*lead, -1).flatten(0, 2)
        found.scatter_(1, each, len(places) - 1)
    return Holding(places, found[:, :length].unflatten(0, lead))


def tier_names(policy: KVPolicy) -> tuple[str, ...]:
    """Name the format of each tier; where several have one name, with the tier's number."""
    formats = policy.formats if policy.formats is not None else Raw()
    if isinstance(formats, TieredFormats):
        names = [str(each) for each in formats.each]
    else:
        names = [formats.name if isinstance(formats, Part) else str(formats)] * formats.tiers
    return tuple(
        name if names.count(name) == 1 else f"{name} (tier {tier})"
        for tier, name in enumerate(names, 1)
    )


def _places(batch: Batch, policy: KVPolicy) -> tuple[Place, ...]:
    names, tiers = tier_names(policy), batch.tiers.tier
    found = []
    for i, tier in enumerate(tiers):
        parts = batch.tiers.parts[i :: len(tiers)]  # of all kinds of heads
        nbytes = _tokens_bytes(parts)
        if tier in tiers[:i]:
            found.append(Place(f"{names[tier]}, waiting raw", "waiting", nbytes))
        else:
            found.append(Place(names[tier], "tier", nbytes))
    if batch.window is not None:
        found.append(Place("raw window", "window", _window_bytes(batch.window)))
    return tuple(found)


def _tokens_bytes(stores: Sequence[TokenStore]) -> int:
    """Bytes of the tokens in some stores, as `MemoryReport` counts them."""
    total = 0
    for store in stores:
        count, layout = int(store.live.sum()), store.layout
        total += count * layout.format.nbytes // layout.format.block
        total += 4 * count * (layout.scores + layout.positions)
    return total


def _window_bytes(window: Window) -> int:
    """All that a raw window takes, in pages or beside them."""
    pages = sum(store.pages_used * store.pool.page_bytes for store in window.stores)
    return window.nbytes + pages
