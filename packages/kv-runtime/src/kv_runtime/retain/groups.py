"""The tokens of layers, as groups for a selector to score."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import pad

from kv_attention import Attended
from kv_policy import FRESH, VectorName
from kv_runtime.batch import Batch, Pass, grid
from kv_runtime.retain.planning import Group
from kv_runtime.window.base import Window


def fresh_group(
    batch: Batch,
    now: Pass,
    key: Tensor,
    value: Tensor,
    reads: frozenset[VectorName],
    mass: Tensor | None = None,
    seen: Tensor | None = None,
    also: Mapping[str, Tensor] = MappingProxyType({}),
) -> Group:
    """Return the new tokens of a pass, with the vectors of padding zero."""
    padding = (now.position < 0)[:, None, :, None] if reads & {"keys", "values"} else None
    if padding is not None and padding.device.type == "cpu" and not padding.any():
        padding = None  # no copies are needed; a device would be waited for

    def vectors(name: VectorName, x: Tensor) -> Tensor | None:
        if name not in reads:
            return None
        return x if padding is None else x.masked_fill(padding, 0)

    return Group(
        position=batch.by_head(now.position),
        tier=FRESH,
        fresh=True,
        mass=mass,
        seen=seen,
        also=also,
        key=vectors("keys", key),
        value=vectors("values", value),
    )


def layer_groups(
    batch: Batch,
    now: Pass,
    layers: slice,
    key: Tensor,
    value: Tensor,
    reads: frozenset[VectorName],
    results: Sequence[Attended],
) -> list[Group]:
    """Return the tokens of layers: each store, the window and the new ones, in attention order.

    Rows are sequences, grouped by layer.

    Args:
        batch: the stored tokens.
        now: the pass, over these layers.
        layers: the layers.
        key: new keys of these layers.
        value: new values of these layers.
        reads: the vectors that the selector reads.
        results: attention observations of each layer, possibly empty.
    """
    parts = iter(range(len(results[0].mass)))

    def observed(slots: int) -> tuple[Tensor | None, Tensor | None, dict[str, Tensor]]:
        """Return the observations of the next part, padded to `slots` per layer."""
        part = next(parts, None)
        if part is None:
            return None, None, {}

        def rows(each: list[Tensor]) -> Tensor:
            more = [slots - x.shape[-1] for x in each]
            return torch.cat([pad(x, (0, n)) if n else x for x, n in zip(each, more, strict=True)])

        names = results[0].also[part] if results[0].also else ()
        return (
            rows([r.mass[part] for r in results]),
            rows([r.seen[part] for r in results]),
            {name: rows([r.also[part][name] for r in results]) for name in names},
        )

    groups = []
    vectors = frozenset(name for name in reads if name != "queries")
    for tier, store in batch.held_stores:
        held = store.read_layers(layers, vectors)
        assert held.position is not None  # pages of a selector store both
        assert held.score is not None
        mass, seen, also = observed(held.held.shape[1])
        groups.append(
            Group(
                position=grid(held.position, batch.shape.kv_heads),
                tier=tier,
                store=store,
                fresh=False,
                score=grid(held.score, batch.shape.kv_heads),
                mass=mass,
                seen=seen,
                also=also,
                key=None if held.key is None else grid(held.key, batch.shape.kv_heads),
                value=None if held.value is None else grid(held.value, batch.shape.kv_heads),
            )
        )
    raw = batch.held_window
    if raw is not None:
        groups.append(_window_group(batch, raw, now, layers, reads, *observed(raw.size)))
    return [*groups, fresh_group(batch, now, key, value, reads, *observed(now.position.shape[1]))]


def loose_groups(batch: Batch, now: Pass, layers: slice) -> list[Group]:
    """Return the tokens of layers that are in no page: those of the window, and new ones."""
    nothing: frozenset[VectorName] = frozenset()
    raw, vectors = batch.held_window, batch.seen  # of which none are read
    held = [] if raw is None else [_window_group(batch, raw, now, layers, nothing)]
    return [*held, fresh_group(batch, now, vectors, vectors, nothing)]


def _window_group(
    batch: Batch,
    raw: Window,
    now: Pass,
    layers: slice,
    reads: frozenset[VectorName],
    mass: Tensor | None = None,
    seen: Tensor | None = None,
    also: Mapping[str, Tensor] = MappingProxyType({}),
) -> Group:
    times = len(now.position) // len(raw.position)
    return Group(
        position=batch.by_head(raw.position.repeat(times, 1)),
        tier=FRESH,
        fresh=False,
        score=raw.scores_of(layers).flatten(0, 1) if raw.has_scores else None,
        mass=mass,
        seen=seen,
        also=also,
        key=raw.keys_of(layers).flatten(0, 1) if "keys" in reads else None,
        value=raw.values_of(layers).flatten(0, 1) if "values" in reads else None,
    )
