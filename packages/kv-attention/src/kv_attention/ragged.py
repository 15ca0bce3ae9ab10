"""Attention of heads whose vectors differ in rank."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from kv_attention.attention import NOTHING, attend
from kv_attention.checks import check_softmax
from kv_attention.tokens import Attended, DenseTokens
from kv_policy import Observe, PagedTokens


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """Heads of a layer with the same rank of keys and the same rank of values.

    `pages` has an entry for each store of the layer, in the same order in all groups; None if these
    heads store no tokens there.
    """

    heads: Int[Tensor, " h"]
    pages: tuple[PagedTokens | None, ...]
    dense: tuple[DenseTokens, ...]
    page_positions: tuple[Int[Tensor, "B h _"] | None, ...] | None = None

    @property
    def dims(self) -> tuple[int, int]:
        """Dimensions of a key and of a value."""
        return self.dense[0].key.shape[-1], self.dense[0].value.shape[-1]


def attend_ragged(
    q: Float[Tensor, "B H G L D"],
    position: Int[Tensor, "B L"],
    groups: Sequence[HeadGroup],
    value_dim: int,
    scale: float,
    observe: Observe = NOTHING,
    backend: str = "torch",
    others: Sequence[Observe] = (),
    softcap: float | None = None,
    sinks: Float[Tensor, "H G"] | None = None,
    chosen: Bool[Tensor, "B L P"] | None = None,
) -> Attended:
    """Compute attention as `attend` does, each group of heads in its own dimensions.

    Args:
        q: queries, zero-padded if a head's keys are shorter than D.
        position: positions of the queries, -1 for padding.
        groups: all heads of the layer, each in one group, with the same dense tokens in order.
        value_dim: Dv, at least the dimension of any head's values.
        scale: the factor of the logits.
        observe: the attention mass to sum per token.
        backend: a name in `all_backends()`.
        others: further observations of the same pass.
        softcap: the bound of the logits, as for `attend`.
        sinks: a logit of each query head, as for `attend`.
        chosen: the tokens that queries attend to, as for `attend`.

    Returns:
        The result of `attend`. Outputs of shorter values are zero-padded. The observed sums have a
        part for every entry of `pages`, with no slots if no group stores tokens there.

    Raises:
        ValueError: as `attend`.
    """
    check_softmax(q, softcap, sinks)
    found = [
        _attended(q, position, group, scale, observe, backend, others, softcap, sinks, chosen)
        for group in groups
    ]
    out = q.new_zeros((*q.shape[:-1], value_dim))
    for group, result in zip(groups, found, strict=True):
        out[:, group.heads, ..., : result.out.shape[-1]] = result.out
    rest = tuple(
        _joined(q.shape[1], groups, [result.others[i] for result in found], out)
        for i in range(len(others))
    )
    whole = _joined(q.shape[1], groups, found, out)
    return Attended(out, whole.mass, whole.seen, whole.also, rest)


def _attended(
    q: Float[Tensor, "B H G L D"],
    position: Int[Tensor, "B L"],
    group: HeadGroup,
    scale: float,
    observe: Observe,
    backend: str,
    others: Sequence[Observe],
    softcap: float | None,
    sinks: Float[Tensor, "H G"] | None,
    chosen: Bool[Tensor, "B L P"] | None,
) -> Attended:
    held = [i for i, pages in enumerate(group.pages) if pages is not None]
    places = group.page_positions
    return attend(
        q[:, group.heads, ..., : group.dims[0]],
        position,
        [pages for pages in group.pages if pages is not None],
        group.dense,
        scale,
        observe,
        page_positions=None if places is None else [places[i] for i in held],
        backend=backend,
        others=others,
        softcap=softcap,
        sinks=None if sinks is None else sinks[group.heads],
        chosen=chosen,
    )


def _joined(
    heads: int, groups: Sequence[HeadGroup], found: Sequence[Attended], out: Tensor
) -> Attended:
    """Concatenate the observed sums of the groups, part by part."""
    if not found[0].mass:
        return Attended(out)
    parts = range(len(groups[0].pages) + len(groups[0].dense))

    def whole(each: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        return [_side_by_side(heads, groups, each, part) for part in parts]

    also = [
        (name, whole([[more[name] for more in a.also] for a in found]))
        for name in sorted(found[0].also[0])
    ]
    return Attended(
        out,
        tuple(whole([a.mass for a in found])),
        tuple(whole([a.seen for a in found])),
        tuple({name: sums[i] for name, sums in also} for i in range(len(parts))),
    )


def _side_by_side(
    heads: int, groups: Sequence[HeadGroup], each: Sequence[Sequence[Tensor]], part: int
) -> Tensor:
    """Return one part's sums of all heads; shorter heads are zero-padded."""
    pieces = [
        (group.heads, sums[place])
        for group, sums in zip(groups, each, strict=True)
        if (place := _place(group, part)) is not None
    ]
    width = max((x.shape[-1] for _, x in pieces), default=0)
    joined = each[0][-1].new_zeros((len(each[0][-1]), heads, width))
    for at, x in pieces:
        joined[:, at] = pad(x, (0, width - x.shape[-1]))
    return joined


def _place(group: HeadGroup, part: int) -> int | None:
    """Return the index of a part of the layer's tokens in a group's results."""
    held = [i for i, pages in enumerate(group.pages) if pages is not None]
    if part >= len(group.pages):
        return len(held) + part - len(group.pages)
    return held.index(part) if part in held else None
