"""Conversion of arguments and results for the native operators."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_attention import Attended, AttentionInputs, DenseTokens, compiled, longest_of
from kv_policy import Observe, PagedTokens, PageLayout
from kv_policy.described import NUMBERS, described

MOST_DIM: Final = 1024  # of a vector
MOST_GROUP: Final = 4096  # queries of a KV head per position
TERMS: Final = {"squares": 1, "entropy": 2}
GROUPS: Final = {"sum": 0, "mean": 1, "max": 2, "max-of-sums": 3}


def refused(inputs: AttentionInputs) -> str | None:
    """Return why native code does not support a pass; None if it does."""
    q = inputs.q
    if q.device.type != "cpu":
        return f"tensors on {q.device.type}"
    if not 0 < q.shape[2] <= MOST_GROUP:
        return f"{q.shape[2]} queries of a KV head; native code supports 1 to {MOST_GROUP}"
    for tokens in inputs.dense:
        if any(x.stride(-1) != 1 and x.shape[-1] != 1 for x in (tokens.key, tokens.value)):
            return "dense tokens whose numbers are not consecutive"
    return compiled.refused(inputs, MOST_DIM, MOST_DIM, blocks=True, planes=True)


def softmax(inputs: AttentionInputs, *, sinks: bool = True) -> tuple[float, list[Tensor]]:
    """Return the bound of the logits, 0 for none, and the sinks, if any and requested."""
    given = inputs.sinks if sinks else None
    return inputs.softcap or 0.0, [] if given is None else [given.float().contiguous()]


def parts(inputs: AttentionInputs, *, watched: bool) -> tuple[list[Tensor], list[int]]:
    """Return the tensors and the numbers of all parts.

    Positions and widths of pages are only read if attention mass is observed (`watched`).
    """
    tensors: list[Tensor] = []
    numbers: list[int] = []
    for part, place in zip(inputs.pages, inputs.page_positions, strict=True):
        at = place if watched else None
        tensors += paged_tensors(part, at)
        numbers += numbers_of_pages(
            part.layout,
            reverse=part.reverse,
            holes=part.holes,
            placed=at is not None,
            width=longest_of(part) if watched else 0,
        )
    for tokens in inputs.dense:
        tensors += _dense_tensors(tokens)
        numbers += _dense_numbers(tokens)
    return tensors, numbers


def watches(watched: Iterable[Observe]) -> tuple[list[int], list[float]]:
    """Return the numbers of all observations, and their thresholds of counted shares."""
    numbers, above = _watches(tuple(watched))
    return [*numbers], [*above]


@lru_cache(maxsize=64)
def _watches(watched: tuple[Observe, ...]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    some = [what for what in watched if what.last != 0]
    numbers = (number for what in some for number in _watch(what))
    return tuple(numbers), tuple(what.above or 0.0 for what in some)


def to_attended(
    out: Float[Tensor, "B H G L Dv"], found: Sequence[Tensor], watched: Sequence[Observe]
) -> list[Attended]:
    """Assign the sums and counts of each part to their observations."""
    sums, seen = found[::2], found[1::2]
    term = row = 0
    results: list[Attended] = []
    for what in watched:
        if what.last == 0:
            results.append(Attended(out))
            continue
        names = sorted(what.also)
        also: tuple[dict[str, Tensor], ...] = tuple(
            {name: part[term + 1 + i] for i, name in enumerate(names)} for part in sums
        )
        mass = tuple(part[term] for part in sums)
        results.append(Attended(out, mass, tuple(part[row] for part in seen), also))
        term += 1 + len(names)
        row += 1
    return results


def paged_tensors(part: PagedTokens, place: Int[Tensor, "B H _"] | None) -> list[Tensor]:
    """Return the tensors of a part in pages, with the positions of its tokens if they are read."""
    table, length = _integers(part.table), _integers(part.length)
    data = part.data if part.data.stride(1) == 1 else part.data.contiguous()
    return [data, table, length, length if place is None else place.long()]


def _integers(x: Tensor) -> Tensor:
    return (x if x.dtype in (torch.int32, torch.int64) else x.long()).contiguous()


def numbers_of_pages(
    layout: PageLayout, *, reverse: bool, holes: bool, placed: bool = False, width: int = 0
) -> list[int]:
    """Return the numbers of a part in pages.

    Args:
        layout: the layout of its pages.
        reverse: as for `PagedTokens`.
        holes: the same.
        placed: whether the positions of its tokens are given.
        width: how many slots are observed.
    """
    pages = described(layout, blocks=True, planes=True)
    at = pages.positions if holes else -1
    numbers = [1, width, *pages.formats, int(placed), *pages.places, at, int(reverse)]
    return [*numbers, *pages.share, *pages.levels]


def _dense_tensors(tokens: DenseTokens) -> list[Tensor]:
    place = tokens.position.long()
    return [tokens.key, tokens.value, place, place]


def _dense_numbers(tokens: DenseTokens) -> list[int]:
    formats = [
        number
        for x in (tokens.key, tokens.value)
        for number in (NUMBERS[x.dtype], x.shape[-1], 0, 1)
    ]
    return [0, tokens.key.shape[2], *formats, 1, *[0] * 7, 1, 1]


def _watch(what: Observe) -> list[int]:
    first = 3 if what.above is not None else int(what.power == 2)
    terms = [first, *(TERMS[name] for name in sorted(what.also))]
    return [GROUPS[what.group], what.skip, len(terms), *terms]
