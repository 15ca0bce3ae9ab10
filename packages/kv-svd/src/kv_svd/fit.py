"""Finding a basis per KV head from samples, after ZACK (Zhang et al., 2024, arXiv 2408.04107).

A head's keys share a basis with the queries that meet them, and its values with the slices of the
output projection that read them (section 4.2). The basis holds the right singular vectors of both
stacked; they are the eigenvectors of the sum of x xᵀ over all rows, so samples are only added up.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from kv_policy import HeadBasis


@dataclass(frozen=True)
class Moments:
    """Second moments of rows per KV head: the sum of x xᵀ. Moments of disjoint samples add up."""

    total: Float64[Tensor, "H D D"]
    rows: int  # per head

    @classmethod
    def of(cls, x: Float[Tensor, "H n D"]) -> "Moments":
        """Sum over the rows of each head, in float64."""
        wide = x.double()
        return cls(wide.mT @ wide, x.shape[1])

    def __add__(self, other: "Moments") -> "Moments":
        """Moments of both samples together.

        Raises:
            ValueError: they are of other heads or dimensions.
        """
        if self.total.shape != other.total.shape:
            raise ValueError(
                f"moments of shape {tuple(self.total.shape)} and {tuple(other.total.shape)} do not "
                "add up; heads and dimensions must be the same"
            )
        return Moments(self.total + other.total, self.rows + other.rows)

    def blocks(self, parts: int) -> "Moments":
        """Moments of each of `parts` equal pieces of a row: what several heads side by side hold.

        Raises:
            ValueError: rows cannot be cut into that many equal pieces.
        """
        heads, dim, _ = self.total.shape
        if parts < 1 or dim % parts:
            raise ValueError(f"rows of {dim} numbers cannot be cut into {parts} equal pieces")
        grid = self.total.unflatten(2, (parts, -1)).unflatten(1, (parts, -1))
        own = grid.diagonal(dim1=1, dim2=3).movedim(-1, 1)
        return Moments(own.reshape(heads * parts, dim // parts, dim // parts), self.rows)


def of_tokens(
    x: Float[Tensor, "B H L D"], there: Bool[Tensor, "B L"] | None = None, together: int = 1
) -> Moments:
    """Moments of a batch of keys (after RoPE) or values.

    Args:
        x: keys or values.
        there: False where there is padding, which is left out.
        together: heads whose vectors are laid side by side, as one of so many times D dimensions.

    Raises:
        ValueError: the heads cannot be taken so many at a time.
    """
    if together < 1 or x.shape[1] % together:
        raise ValueError(f"{x.shape[1]} heads cannot be taken {together} at a time; give a divisor")
    side_by_side = x.unflatten(1, (-1, together)).transpose(2, 3).flatten(3)
    return Moments.of(_rows(side_by_side, there))


def of_queries(q: Float[Tensor, "B H G L D"], there: Bool[Tensor, "B L"] | None = None) -> Moments:
    """Moments of the queries of each KV head's group, to be added to those of its keys."""
    if there is not None:
        there = there[:, None].expand(-1, q.shape[2], -1).flatten(1)
    return Moments.of(_rows(q.flatten(2, 3), there))


def of_output(o_proj: Float[Tensor, "hidden QD"], heads: int, dim: int) -> Moments:
    """Moments of the output projection's slices, to be added to those of each KV head's values.

    Args:
        o_proj: weight of the projection, columns by query head and dimension.
        heads: KV heads; consecutive query heads belong to one.
        dim: dimensions of a value.

    Raises:
        ValueError: the columns are no multiple of heads times dimensions.
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
    """Where heads' vectors are stored: directions by falling importance, and how important."""

    matrix: Float64[Tensor, "H D E"]  # of a stored head, one block of rows per head in it
    singular: Float64[Tensor, "H2 E"]
    dual: Float64[Tensor, "H D E"] | None = None  # None: the matrix, whose columns are orthonormal
    together: int = 1  # heads stored as one


def rotation(moments: Moments, together: int = 1) -> Directions:
    """Give the right singular vectors and singular values of each head's stacked rows.

    Of a vector and its negative, the one whose largest element is positive is taken, so equal
    moments give equal directions. Values under about 1e-8 of a head's greatest are rounding.

    Args:
        moments: of the rows.
        together: heads that lie side by side in each row.

    Raises:
        ValueError: there are no samples, or an infinity or a NaN among them.
    """
    if moments.rows == 0:
        raise ValueError("a basis cannot be fitted to no samples; add some tokens first")
    if not moments.total.isfinite().all():
        raise ValueError("the samples hold an infinity or a NaN; leave out what is padding")
    values, vectors = torch.linalg.eigh(moments.total)
    matrix = vectors.flip(-1)
    matrix = matrix * positive(matrix)
    by_head = matrix.unflatten(1, (together, -1)).flatten(0, 1)
    return Directions(by_head, values.flip(-1).clamp(min=0).sqrt(), together=together)


def positive(columns: Float64[Tensor, "H D E"]) -> Float64[Tensor, "H 1 E"]:
    """Signs that make the largest element of every column positive."""
    return columns.gather(1, columns.abs().argmax(1, keepdim=True)).sign()


def ranks(
    singular: Float64[Tensor, "*heads D"], removal: int | float, multiple: int = 1
) -> Int[Tensor, "*heads"]:
    """Dimensions that each head keeps at a removal rate shared by all (ZACK Eq. 6).

    It is the fewest with which the singular values left out sum to at most `removal` of the head's
    sum, and at least one.

    Args:
        singular: falling singular values; of any heads and layers together.
        removal: share of their sum that may go, from 0 to below 1.
        multiple: ranks are rounded up to a multiple of this where kernels want it (ZACK: 16).

    Raises:
        ValueError: the rate or the multiple is out of range.
    """
    if not 0 <= removal < 1:
        raise ValueError(f"the removal rate is {removal}; it must be at least 0 and below 1")
    if multiple < 1:
        raise ValueError(f"ranks cannot be multiples of {multiple}; give 1 or more")
    left_out = singular.flip(-1).cumsum(-1).flip(-1)  # with d dimensions kept: element d
    kept = (left_out > removal * left_out[..., :1]).sum(-1).clamp(min=1)
    return ((kept + multiple - 1) // multiple * multiple).clamp(max=singular.shape[-1])


def basis(
    found: Directions, rank: Int[Tensor, " H2"], dtype: torch.dtype = torch.float32
) -> HeadBasis:
    """Cut each stored head's directions to its rank; no wider than the greatest rank."""
    width = int(rank.max())
    kept = torch.arange(width, device=rank.device) < rank[:, None]
    kept = kept.repeat_interleave(found.together, 0)[:, None]
    matrix = (found.matrix[..., :width] * kept).to(dtype)
    dual = None if found.dual is None else (found.dual[..., :width] * kept).to(dtype)
    return HeadBasis(matrix, tuple(rank.tolist()), dual, found.together)
