"""A layer's attention over its stored tokens and the new tokens."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_attention import Attended, DenseTokens, attend, attend_ragged, select_pages
from kv_policy import Observe, PagedTokens, PageReading
from kv_runtime.batch import Batch, Pass, grid


def attended(
    batch: Batch,
    now: Pass,
    layer: int,
    fresh: tuple[Float[Tensor, "B H G Lq D"], Float[Tensor, "B H L D"], Float[Tensor, "B H L Dv"]],
    scale: float,
    watch: tuple[Observe, ...],
    backend: str,
    softcap: float | None = None,
    sinks: Float[Tensor, "H G"] | None = None,
    chosen: Bool[Tensor, "B Lq P"] | None = None,
    out: Float[Tensor, "B H G Lq Dv"] | None = None,
    reading: PageReading | None = None,
) -> Attended:
    """Compute the attention of a pass, on vectors projected into the basis if there is one.

    Fewer queries than columns are those of the last columns.

    Args:
        batch: the stored tokens.
        now: the pass.
        layer: the layer.
        fresh: queries, keys and values of the pass.
        scale: the scale of attention logits.
        watch: observations to compute; the first is in the main result.
        backend: the attention backend.
        softcap: the bound of the logits, as for `kv_attention.attend`.
        sinks: a logit of each query head, by stored head.
        chosen: the tokens that each query attends to by position, as for `kv_attention.attend`.
        out: memory for the output, as for `kv_attention.attend`.
        reading: the pages that decode steps read; None: all.

    Raises:
        ValueError: as `attend`, or tokens are chosen and a reading is given.
    """
    query, key, value = fresh
    sees, queries = now.sees, query.shape[3]
    if queries < sees.shape[1]:
        sees = sees[:, -queries:]
    # Padding is only checked in prefill, where it determines the attention kernel.
    new = DenseTokens(key, value, now.position, full=now.is_prefill and now.is_full)
    by_place = watch[0].skip > 1 or watch[0].gumbel is not None
    places = _places(batch, layer) if by_place or chosen is not None else None
    groups = batch.groups(layer, new, places)
    if groups is not None:
        width = value.shape[-1]
        options = scale, watch[0], backend, watch[1:], softcap, sinks, chosen
        return attend_ragged(query, sees, groups, width, *options)
    pages, dense = batch.views(layer)
    dense.append(new)
    if chosen is not None and reading is not None:
        raise ValueError(
            f"a policy with {reading} selects the pages that a query reads, but this model selects "
            "the tokens itself (sparse attention); omit the reading"
        )
    if reading is not None and not now.is_prefill:
        rows = query.squeeze(3).flatten(1, 2)
        pages = pages_read(batch, layer, rows, 0, pages, reading, backend)
    return attend(
        query,
        sees,
        pages,
        dense,
        scale,
        watch[0],
        places,
        backend,
        watch[1:],
        softcap,
        sinks,
        chosen,
        out,
    )


def pages_read(
    batch: Batch,
    layer: int,
    query: Float[Tensor, "m Q D"],
    first: int,
    pages: Sequence[PagedTokens],
    reading: PageReading | None,
    backend: str,
) -> list[PagedTokens]:
    """Return a layer's pages as a decode pass reads them.

    Args:
        batch: the stored tokens, with bounds if there is a reading.
        layer: the layer.
        query: queries by token and query head, in the basis of the stored keys.
        first: the row of the first sequence; those of the others follow.
        pages: all pages, in the order of `Batch.views`.
        reading: the pages that decode steps read; None: all.
        backend: selects them.
    """
    bounds = None
    if reading is not None and layer >= reading.whole_layers:
        bounds = batch.page_bounds(layer)
    if reading is None or bounds is None:
        return [*pages]
    rows = query[first : first + len(batch.seen)]
    by_head = rows.unflatten(1, (batch.shape.kv_heads, -1))
    return [select_pages(by_head, pages[0], bounds, reading, backend), *pages[1:]]


def _places(batch: Batch, layer: int) -> list[Int[Tensor, "B H _"]]:
    """Return the positions of a layer's tokens in pages.

    Pages without positions are those of a policy that keeps every token: all are in order, in the
    stores one after the other.
    """
    found, before = [], torch.zeros((), dtype=torch.long, device=batch.seen.device)
    for _, store in batch.held_stores:
        read = store.read_layer(layer)
        place = read.position
        if place is None:
            place = before + torch.arange(read.held.shape[1], device=batch.seen.device)
            place = place.expand_as(read.held)
            before = before + read.held.sum(1, keepdim=True)
        found.append(grid(place, batch.shape.kv_heads))
    raw = batch.held_window
    return found if raw is None or not raw.in_pages else [*found, batch.by_head(raw.position)]
