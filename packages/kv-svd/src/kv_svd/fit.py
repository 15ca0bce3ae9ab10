"""Fitting of a basis per KV head to samples, after ZACK (Zhang et al., 2024, arXiv 2408.04107).

A head's keys share a basis with the queries of their group, and its values with the slices of the
output projection that multiply them (section 4.2). The basis holds the right singular vectors of
both stacked; they are the eigenvectors of the sum of x xᵀ over all rows, so samples are only
accumulated.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from kv_policy import HeadBasis


@dataclass(frozen=True)
class Moments:
    """Second moments of rows per KV head: the sum of x xᵀ. Disjoint samples are additive."""

    total: Float64[Tensor, "H D D"]
    rows: int  # per head

    @classmethod
    def of(cls, x: Float[Tensor, "H n D"]) -> "Moments":
        """Sum over the rows of each head, in float64."""
        wide = x.double()
        return cls(wide.mT @ wide, x.shape[1])

    def __add__(self, other: "Moments") -> "Moments":
        """Return the moments of both samples combined.

        Raises:
            ValueError: heads or dimensions differ.
        """
        if self.total.shape != other.total.shape:
            raise ValueError(
                f"moments of shape {tuple(self.total.shape)} and {tuple(other.total.shape)} cannot "
                "be added; heads and dimensions must be equal"
            )
        return Moments(self.total + other.total, self.rows + other.rows)

    def blocks(self, parts: int) -> "Moments":
        """Return the moments of each of `parts` equal pieces of a row, such as concatenated heads.

        Raises:
            ValueError: rows cannot be split into that many equal pieces.
        """
        heads, dim, _ = self.total.shape
        if parts < 1 or dim % parts:
            raise ValueError(f"rows of {dim} numbers cannot be split into {parts} equal pieces")
        grid = self.total.unflatten(2, (parts, -1)).unflatten(1, (parts, -1))
        own = grid.diagonal(dim1=1, dim2=3).movedim(-1, 1)
        return Moments(own.reshape(heads * parts, dim // parts, dim // parts), self.rows)


def of_tokens(
    x: Float[Tensor, "B H L D"], there: Bool[Tensor, "B L"] | None = None, together: int = 1
) -> Moments:
    """Return the moments of a batch of keys (after RoPE) or values.

    Args:
        x: keys or values.
        there: False for padding, which is ignored.
        together: heads whose vectors are concatenated into one of `together` times D dimensions.

    Raises:
        ValueError: `together` does not divide the heads.
    """
    if together < 1 or x.shape[1] % together:
        raise ValueError(f"{x.shape[1]} heads cannot be grouped by {together}; choose a divisor")
    side_by_side = x.unflatten(1, (-1, together)).transpose(2, 3).flatten(3)
    return Moments.of(_rows(side_by_side, there))


def of_queries(q: Float[Tensor, "B H G L D"], there: Bool[Tensor, "B L"] | None = None) -> Moments:
    """Return the moments of the queries of each KV head's group, to be added to its keys'."""
    if there is not None:
        there = there[:, None].expand(-1, q.shape[2], -1).flatten(1)
    return Moments.of(_rows(q.flatten(2, 3), there))


def of_output(o_proj: Float[Tensor, "hidden QD"], heads: int, dim: int) -> Moments:
    """Return the moments of the output projection's slices, to be added to each KV head's values'.

    Args:
        o_proj: weight of the projection, columns by query head and dimension.
        heads: KV heads; consecutive query heads belong to one.
        dim: dimensions of a value.

    Raises:
        ValueError: the number of columns is not a multiple of heads times dimensions.
    """
    if o_proj.shape[1] % (heads * dim):
        raise ValueError(
            f"the output projection has {o_proj.shape[1]} columns; {heads} KV heads of {dim} "
            f"dimensions need a multiple of {heads * dim}"
        )
    slices = o_proj.reshape(len(o_proj), heads, -1, dim)  # hidden H G D
    return Moments.of(slices.permute(1, 0, 2, 3).flatten(1, 2))


def _rows(x: Float[Tensor, "B H L D"], there: Bool[Tensor, "B L"] | None) -> Float[Tensor, "H n D"]:
    rows = x.transpose(0, 1).flatten(1, 2)
    return rows if there is None else rows[:, there.flatten()]


@dataclass(frozen=True)
class Directions:
    """Directions of stored heads in descending order of importance, with singular values."""

    matrix: Float64[Tensor, "H D E"]  # of a stored head, one block of rows per head in it
    singular: Float64[Tensor, "H2 E"]
    dual: Float64[Tensor, "H D E"] | None = None  # None: the matrix, whose columns are orthonormal
    together: int = 1  # KV heads stored as one


def rotation(moments: Moments, together: int = 1) -> Directions:
    """Return the right singular vectors and singular values of each head's stacked rows.

    The sign of a vector makes its largest element positive, so equal moments give equal directions.
    Values under about 1e-8 of a head's greatest are rounding errors.

    Args:
        moments: of the rows.
        together: heads concatenated in each row.

    Raises:
        ValueError: there are no samples, or they contain an infinity or NaN.
    """
    if moments.rows == 0:
        raise ValueError("a basis cannot be fitted without samples; add some tokens first")
    if not moments.total.isfinite().all():
        raise ValueError("the samples contain an infinity or NaN; mask padding")
    values, vectors = torch.linalg.eigh(moments.total)
    matrix = vectors.flip(-1)
    matrix = matrix * positive(matrix)
    by_head = matrix.unflatten(1, (together, -1)).flatten(0, 1)
    return Directions(by_head, values.flip(-1).clamp(min=0).sqrt(), together=together)


def positive(columns: Float64[Tensor, "H D E"]) -> Float64[Tensor, "H 1 E"]:
    """Return the signs that make the largest element of every column positive."""
    return columns.gather(1, columns.abs().argmax(1, keepdim=True)).sign()


def ranks(
    singular: Float64[Tensor, "*heads D"], removal: int | float, multiple: int = 1
) -> Int[Tensor, "*heads"]:
    """Return the dimensions that each head keeps at a common removal rate (ZACK Eq. 6).

    Each is the smallest number with which the omitted singular values sum to at most `removal` of
    the head's sum, and at least one.

    Args:
        singular: descending singular values; of any heads and layers.
        removal: share of their sum to remove, from 0 to below 1.
        multiple: ranks are rounded up to a multiple of this where kernels want it (ZACK: 16).

    Raises:
        ValueError: the rate or the multiple is out of range.
    """
    if not 0 <= removal < 1:
        raise ValueError(f"the removal rate is {removal}; it must be at least 0 and below 1")
    if multiple < 1:
        raise ValueError(f"ranks cannot be multiples of {multiple}; use 1 or more")
    left_out = singular.flip(-1).cumsum(-1).flip(-1)  # with d dimensions kept: element d
    kept = (left_out > removal * left_out[..., :1]).sum(-1).clamp(min=1)
    return ((kept + multiple - 1) // multiple * multiple).clamp(max=singular.shape[-1])


def basis(
    found: Directions, rank: Int[Tensor, " H2"], dtype: torch.dtype = torch.float32
) -> HeadBasis:
    """Truncate each stored head's directions to its rank, with the width of the greatest rank."""
    width = int(rank.max())
    kept = torch.arange(width, device=rank.device) < rank[:, None]
    kept = kept.repeat_interleave(found.together, 0)[:, None]
    matrix = (found.matrix[..., :width] * kept).to(dtype)
    dual = None if found.dual is None else (found.dual[..., :width] * kept).to(dtype)
    return HeadBasis(matrix, tuple(rank.tolist()), dual, found.together)
