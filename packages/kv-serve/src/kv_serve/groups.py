"""What a layer holds, as groups of tokens that a selector can score."""

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor
from torch.nn.functional import pad

from kv_attention import Attended
from kv_policy import FRESH, Vectors
from kv_serve.batch import Batch, Pass, grid
from kv_serve.planning import Group


def fresh_group(
    batch: Batch,
    now: Pass,
    key: Tensor,
    value: Tensor,
    reads: frozenset[Vectors],
    mass: Tensor | None = None,
    seen: Tensor | None = None,
    also: Mapping[str, Tensor] = MappingProxyType({}),
) -> Group:
    """The tokens that a pass brings."""
    return Group(
        position=batch.by_head(now.position),
        tier=FRESH,
        fresh=True,
        mass=mass,
        seen=seen,
        also=also,
        key=key if "keys" in reads else None,
        value=value if "values" in reads else None,
    )


def layer_groups(
    batch: Batch,
    now: Pass,
    layer: int,
    key: Tensor,
    value: Tensor,
    reads: frozenset[Vectors],
    result: Attended | None = None,
) -> list[Group]:
    """A layer's tokens: each store, the window, the fresh ones, in the order they are attended."""
    masses = iter(() if result is None else result.mass)
    counts = iter(() if result is None else result.seen)
    more = iter(() if result is None else result.also)
    groups = []
    stored = frozenset(name for name in reads if name != "queries")
    for tier, store in batch.held_stores:
        held = store.read_layer(layer, stored)
        assert held.position is not None  # a selector's pages have both
        assert held.score is not None
        groups.append(
            Group(
                position=grid(held.position.masked_fill(~held.held, -1), batch.shape.kv_heads),
                tier=tier,
                store=store,
                fresh=False,
                score=grid(held.score, batch.shape.kv_heads),
                mass=_padded(next(masses, None), held.held.shape[1]),
                seen=_padded(next(counts, None), held.held.shape[1]),
                also={k: _pad(x, held.held.shape[1]) for k, x in next(more, {}).items()},
                key=None if held.key is None else grid(held.key, batch.shape.kv_heads),
                value=None if held.value is None else grid(held.value, batch.shape.kv_heads),
            )
        )
    raw = batch.held_window
    if raw is not None:
        groups.append(
            Group(
                position=batch.by_head(raw.position),
                tier=FRESH,
                fresh=False,
                score=raw.scores(layer) if raw.has_scores else None,
                mass=next(masses, None),
                seen=next(counts, None),
                also=next(more, {}),
                key=raw.keys(layer) if "keys" in reads else None,
                value=raw.values(layer) if "values" in reads else None,
            )
        )
    observed = next(masses, None), next(counts, None), next(more, {})
    return [*groups, fresh_group(batch, now, key, value, reads, *observed)]


def _padded(x: Tensor | None, slots: int) -> Tensor | None:
    """What was observed of a layer's slots, over as many as the store's longest stream has."""
    return None if x is None else _pad(x, slots)


def _pad(x: Tensor, slots: int) -> Tensor:
    return pad(x, (0, slots - x.shape[-1]))
