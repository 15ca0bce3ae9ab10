"""Attention of a padded batch, in the rows of an engine's output."""

from jaxtyping import Float, Int
from torch import Tensor


def decode_rows(
    output: Float[Tensor, "m Q Dv"], rows: slice | Int[Tensor, " n"], length: int, heads: int
) -> Float[Tensor, "B H G 1 Dv"] | None:
    """Return rows of `output` in the shape of attention's output, so that it may write there.

    Args:
        output: by token and query head.
        rows: those of the batch.
        length: tokens of each sequence.
        heads: KV heads.

    Returns:
        A view; None unless the rows follow each other and each sequence has one token.
    """
    if not isinstance(rows, slice) or length != 1:
        return None
    found: Tensor = output[rows].unflatten(1, (heads, -1))
    return found.unsqueeze(3)


def write_rows(
    found: Float[Tensor, "B H G L Dv"],
    output: Float[Tensor, "m Q Dv"],
    rows: slice | Int[Tensor, " n"],
    place: Int[Tensor, " n"] | None,
) -> None:
    """Write attention to the rows of its tokens.

    Args:
        found: attention of the batch.
        output: by token and query head.
        rows: the row of each token.
        place: the flat index of each token in the batch; None: there is no padding.
    """
    by_token = found.permute(0, 3, 1, 2, 4)
    if isinstance(rows, slice):
        output[rows].view(by_token.shape).copy_(by_token)
        return
    flat = by_token.flatten(2, 3).flatten(0, 1)
    flat = flat if place is None else flat.index_select(0, place)
    output.index_copy_(0, rows, flat.to(output.dtype))
