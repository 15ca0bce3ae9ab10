"""A basis per head: what is stored is the vector's coordinates in it."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class HeadBasis:
    """One linear map per KV head; head h keeps its first `rank[h]` coordinates.

    Columns of `matrix` past a head's rank are zero, so a product with the whole matrix is right for
    every head while pages store rank[h] numbers.
    """

    matrix: Float[Tensor, "H D R"]
    rank: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check the ranks against the matrix, and that nothing is kept past them."""
        heads, dim, width = self.matrix.shape
        if len(self.rank) != heads or not all(1 <= r <= min(dim, width) for r in self.rank):
            raise ValueError(
                f"ranks {self.rank} do not fit {heads} heads of {dim} dimensions in a basis of "
                f"{width} columns; give each head a rank from 1 to {min(dim, width)}"
            )
        column = torch.arange(width, device=self.matrix.device)
        past = column >= torch.tensor(self.rank, device=self.matrix.device)[:, None]
        if (self.matrix.mT[past] != 0).any():
            raise ValueError("columns past a head's rank must be zero")

    def project(self, x: Float[Tensor, "B H L D"]) -> Float[Tensor, "B H L R"]:
        """Coordinates of keys or values, as they are stored."""
        return x @ self.matrix.to(x.dtype)

    def project_queries(self, q: Float[Tensor, "B H G L D"]) -> Float[Tensor, "B H G L R"]:
        """Coordinates of queries: their products with stored keys are the attention logits."""
        return q @ self.matrix.to(q.dtype)[:, None]


@dataclass(frozen=True)
class LayerBasis:
    """The maps of one layer. Keys need k·R and q·R; values are undone once, after attention."""

    key: HeadBasis | None = None
    value: HeadBasis | None = None


def fold_values(
    basis: HeadBasis,
    v_proj: Float[Tensor, "HD hidden"],
    o_proj: Float[Tensor, "hidden QD"],
) -> tuple[Float[Tensor, "HR hidden"], Float[Tensor, "hidden QR"]]:
    """Put a value basis into the two projections around attention (ZACK section 4.1).

    The new `v_proj` gives coordinates (R per KV head) and the new `o_proj` reads them, so attention
    runs in the reduced space and nothing is rotated back per token. Exact where the basis is
    orthonormal and of full rank.

    Args:
        basis: value maps, D to R, one per KV head.
        v_proj: weight of the value projection, rows by KV head and dimension.
        o_proj: weight of the output projection, columns by query head and dimension.

    Raises:
        ValueError: the weights do not have the basis's heads and dimensions.
    """
    heads, dim, width = basis.matrix.shape
    if v_proj.shape[0] != heads * dim or o_proj.shape[1] % (heads * dim):
        raise ValueError(
            f"v_proj has {v_proj.shape[0]} rows and o_proj {o_proj.shape[1]} columns; a basis of "
            f"{heads} heads of {dim} dimensions needs {heads * dim} rows and a multiple in columns"
        )
    matrix = basis.matrix.to(torch.promote_types(v_proj.dtype, torch.float32))
    hidden_in, hidden_out = v_proj.shape[1], o_proj.shape[0]
    folded_v = matrix.mT @ v_proj.to(matrix.dtype).reshape(heads, dim, hidden_in)
    per_head = o_proj.to(matrix.dtype).reshape(hidden_out, heads, -1, dim)
    folded_o = torch.einsum("ohgd,hdr->ohgr", per_head, matrix)
    return (
        folded_v.reshape(heads * width, hidden_in).to(v_proj.dtype),
        folded_o.reshape(hidden_out, -1).to(o_proj.dtype),
    )
