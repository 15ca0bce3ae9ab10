"""Checks of the arguments' shapes and dtypes against each other."""

from collections.abc import Sequence
from math import isfinite

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_attention.tokens import DenseTokens
from kv_policy import Observe, PagedTokens


def check_queries(q: Tensor, position: Tensor) -> None:
    """Raise if queries, or their positions, have a wrong shape."""
    if q.ndim != 5 or 0 in q.shape or not q.is_floating_point():
        raise ValueError(
            f"queries are {q.dtype} of shape {tuple(q.shape)}; give floating-point numbers of "
            "shape [sequences, KV heads, group, queries, dimension], none of them 0"
        )
    if position.shape != (q.shape[0], q.shape[3]):
        raise ValueError(
            f"positions are of shape {tuple(position.shape)}; {q.shape[3]} queries of "
            f"{q.shape[0]} sequences need {(q.shape[0], q.shape[3])}"
        )


def check_softmax(q: Tensor, softcap: float | None, sinks: Tensor | None) -> None:
    """Raise if the bound of logits is no positive number, or sinks have a wrong shape or dtype."""
    if softcap is not None and not (isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap is {softcap}; give a positive number, or None for no bound")
    if sinks is not None and (sinks.shape != q.shape[1:3] or not sinks.is_floating_point()):
        raise ValueError(
            f"sinks are {sinks.dtype} of shape {tuple(sinks.shape)}; give floating-point numbers "
            f"of shape [KV heads, group], here {tuple(q.shape[1:3])}"
        )


def check_chosen(q: Float[Tensor, "B H G L D"], chosen: Tensor | None) -> None:
    """Raise if the tokens that queries attend to are not marked for each query."""
    if chosen is None:
        return
    lead = q.shape[0], q.shape[3]
    if (
        chosen.dtype != torch.bool
        or chosen.ndim != 3
        or chosen.shape[:2] != lead
        or not chosen.numel()
    ):
        raise ValueError(
            f"chosen is {chosen.dtype} of shape {tuple(chosen.shape)}; give booleans of shape "
            f"[sequences, queries, positions], here {lead} and 1 or more positions"
        )


def check_parts(
    q: Float[Tensor, "B H G L D"], pages: Sequence[PagedTokens], dense: Sequence[DenseTokens]
) -> int:
    """Return the dimension of values; raise if tokens do not match the queries or each other."""
    dims = set()
    for i, part in enumerate(pages):
        _check_pages(f"pages[{i}]", part, q)
        dims.add(part.layout.format.value.dim)
    for i, tokens in enumerate(dense):
        _check_dense(f"dense[{i}]", tokens, q)
        dims.add(tokens.value.shape[-1])
    if len(dims) > 1:
        raise ValueError(
            f"values of the parts have {', '.join(map(str, sorted(dims)))} dimensions; "
            "they must all have the same number"
        )
    return dims.pop() if dims else q.shape[-1]


def _check_pages(name: str, part: PagedTokens, q: Float[Tensor, "B H G L D"]) -> None:
    heads, layout = tuple(q.shape[:2]), part.layout
    if part.length.shape != heads or part.table.shape[:2] != heads:
        raise ValueError(
            f"{name} has lengths of shape {tuple(part.length.shape)} and a table of shape "
            f"{tuple(part.table.shape)}; both must start with [sequences, KV heads], here {heads}"
        )
    if part.data.shape[1] != layout.nbytes:
        raise ValueError(
            f"{name} has pages of {part.data.shape[1]} bytes; its layout has {layout.nbytes}"
        )
    if layout.format.key.dim != q.shape[-1]:
        raise ValueError(
            f"{name} stores keys of {layout.format.key.dim} dimensions and queries have "
            f"{q.shape[-1]}; project both into the same basis"
        )
    room, longest = part.table.shape[2] * layout.tokens, longest_of(part)
    if longest > room:
        raise ValueError(
            f"{name} has a table row of {longest} tokens; its table covers at most {room}"
        )
    if part.holes and not layout.positions:
        raise ValueError(
            f"{name} may have empty slots, and its pages store no positions to mark them; "
            "use a layout with positions=True"
        )


def longest_of(part: PagedTokens) -> int:
    """Return an upper bound of the table rows' lengths; synchronize if `longest` is None."""
    return int(part.length.max()) if part.longest is None else part.longest


def _check_dense(name: str, tokens: DenseTokens, q: Float[Tensor, "B H G L D"]) -> None:
    places = (*q.shape[:2], tokens.key.shape[2])
    if tokens.key.shape[:-1] != places or tokens.value.shape[:-1] != places:
        raise ValueError(
            f"{name} has keys of shape {tuple(tokens.key.shape)} and values of shape "
            f"{tuple(tokens.value.shape)}; both must start with [sequences, KV heads, tokens], "
            f"here {places}"
        )
    if tokens.key.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"{name} has keys of {tokens.key.shape[-1]} dimensions and queries have {q.shape[-1]}; "
            "project both into the same basis"
        )
    if tokens.position.shape != (places[0], places[2]):
        raise ValueError(
            f"{name} has positions of shape {tuple(tokens.position.shape)}; {places[2]} tokens of "
            f"{places[0]} sequences need {(places[0], places[2])}"
        )


def check_positions(
    q: Float[Tensor, "B H G L D"],
    pages: Sequence[PagedTokens],
    positions: Sequence[Int[Tensor, "B H _"] | None],
    observe: Observe,
    *,
    chooses: bool = False,
) -> None:
    """Raise if positions do not match the pages, or are required and missing."""
    if len(positions) != len(pages):
        raise ValueError(
            f"page_positions has {len(positions)} entries for {len(pages)} tiers in pages"
        )
    for i, (part, at) in enumerate(zip(pages, positions, strict=True)):
        longest = longest_of(part)
        if at is None:
            if chooses and longest:
                raise ValueError(
                    "queries that choose tokens need the positions of the stored ones; give "
                    f"page_positions[{i}]"
                )
            far = observe.skip > 1 or observe.gumbel is not None
            if far and observe.last != 0 and longest:
                raise ValueError(
                    f"observing with skip={observe.skip} and gumbel={observe.gumbel} needs the "
                    f"positions of the stored tokens; give page_positions[{i}]"
                )
        elif at.shape[:2] != q.shape[:2] or at.shape[2] < longest:
            raise ValueError(
                f"page_positions[{i}] is of shape {tuple(at.shape)}; {tuple(q.shape[:2])} rows "
                f"of up to {longest} tokens need {(*q.shape[:2], longest)} or more"
            )
