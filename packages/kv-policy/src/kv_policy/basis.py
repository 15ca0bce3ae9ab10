"""A basis per head: what is stored is the vector's coordinates in it."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class HeadBasis:
    """Linear maps of the KV heads of a layer; each stored head keeps its first `rank` coordinates.

    Columns of `matrix` past a head's rank are zero, so a product with the whole matrix is right for
    every head while pages store as many numbers as the rank says. What meets the stored vectors,
    queries or the output, is mapped by `dual`: q·dual times k·matrix stands for q·k. With
    orthonormal columns that is the matrix itself.

    `together` consecutive KV heads may be stored as one, whose coordinates are the sum of theirs:
    a basis of their vectors laid side by side. Their query heads become one larger group.
    """

    matrix: Float[Tensor, "H D R"]
    rank: tuple[int, ...]  # of each stored head
    dual: Float[Tensor, "H D R"] | None = None  # None: the matrix
    together: int = 1

    def __post_init__(self) -> None:
        """Check the ranks against the matrix, and that nothing is kept past them."""
        heads, dim, width = self.matrix.shape
        if self.together < 1 or heads % self.together:
            raise ValueError(
                f"{heads} KV heads cannot be stored {self.together} at a time; give a divisor"
            )
        most = min(dim * self.together, width)
        if len(self.rank) * self.together != heads or not all(1 <= r <= most for r in self.rank):
            raise ValueError(
                f"ranks {self.rank} do not fit {heads // self.together} heads of "
                f"{dim * self.together} dimensions in a basis of {width} columns; give each head a "
                f"rank from 1 to {most}"
            )
        if self.dual is not None and self.dual.shape != self.matrix.shape:
            raise ValueError(
                f"the dual has shape {tuple(self.dual.shape)}; it must be that of the matrix, "
                f"{tuple(self.matrix.shape)}"
            )
        column = torch.arange(width, device=self.matrix.device)
        rank = torch.tensor(self.rank, device=column.device).repeat_interleave(self.together)
        past = column >= rank[:, None]
        if any((m.mT[past] != 0).any() for m in (self.matrix, self.dual) if m is not None):
            raise ValueError("columns past a head's rank must be zero")

    def project(self, x: Float[Tensor, "B H L D"]) -> Float[Tensor, "B H2 L R"]:
        """Coordinates of keys or values, as they are stored, by stored head."""
        found = x @ self.matrix.to(x.dtype)
        return found if self.together == 1 else found.unflatten(1, (-1, self.together)).sum(2)

    def project_queries(self, q: Float[Tensor, "B H G L D"]) -> Float[Tensor, "B H2 G2 L R"]:
        """Coordinates of queries: their products with stored keys are the attention logits."""
        found = q @ self._dual(q.dtype)
        if self.together == 1:
            return found
        by_stored: Tensor = found.unflatten(1, (-1, self.together)).flatten(2, 3)
        return by_stored

    def undo(self, out: Float[Tensor, "B H2 G2 L R"]) -> Float[Tensor, "B H G L D"]:
        """Turn sums of stored values, one per query, back into the space of values."""
        if self.together > 1:
            out = out.unflatten(2, (self.together, -1)).flatten(1, 2)
        return out @ self._dual(out.dtype).mT

    def to(self, device: torch.device, dtype: torch.dtype) -> "HeadBasis":
        """The same maps on another device, in another dtype."""
        dual = None if self.dual is None else self.dual.to(device, dtype)
        return HeadBasis(self.matrix.to(device, dtype), self.rank, dual, self.together)

    def _dual(self, dtype: torch.dtype) -> Float[Tensor, "H 1 D R"]:
        return (self.matrix if self.dual is None else self.dual).to(dtype)[:, None]


@dataclass(frozen=True)
class LayerBasis:
    """The maps of one layer. Keys need k·R and q·R; values are undone once, after attention."""

    key: HeadBasis | None = None
    value: HeadBasis | None = None

    def __post_init__(self) -> None:
        """Check that keys and values are stored by the same heads.

        Raises:
            ValueError: they are not.
        """
        if self._together(self.key) != self._together(self.value):
            raise ValueError(
                f"keys of {self._together(self.key)} KV heads are stored together and values of "
                f"{self._together(self.value)}; a page holds both, so give the same number"
            )

    @property
    def together(self) -> int:
        """KV heads that are stored as one."""
        return self._together(self.key)

    @staticmethod
    def _together(basis: HeadBasis | None) -> int:
        return 1 if basis is None else basis.together


def fold_values(
    basis: HeadBasis,
    v_proj: Float[Tensor, "HD hidden"],
    o_proj: Float[Tensor, "hidden QD"],
) -> tuple[Float[Tensor, "HR hidden"], Float[Tensor, "hidden QR"]]:
    """Put a value basis into the two projections around attention (ZACK section 4.1).

    The new `v_proj` gives coordinates (R per stored head) and the new `o_proj` reads them, so
    attention runs in the reduced space and nothing is rotated back per token. Exact where the basis
    is of full rank.

    Args:
        basis: value maps, D to R, one per KV head.
        v_proj: weight of the value projection, rows by KV head and dimension.
        o_proj: weight of the output projection, columns by query head and dimension.

    Raises:
        ValueError: the weights do not have the basis's heads and dimensions.
    """
    heads, dim, _ = basis.matrix.shape
    if v_proj.shape[0] != heads * dim or o_proj.shape[1] % (heads * dim):
        raise ValueError(
            f"v_proj has {v_proj.shape[0]} rows and o_proj {o_proj.shape[1]} columns; a basis of "
            f"{heads} heads of {dim} dimensions needs {heads * dim} rows and a multiple in columns"
        )
    # Float64 costs nothing here, and a basis of full rank then folds to the weights' own rounding.
    matrix = basis.matrix.to(v_proj.device, torch.float64)
    dual = matrix if basis.dual is None else basis.dual.to(matrix)
    hidden_in, hidden_out = v_proj.shape[1], o_proj.shape[0]
    folded_v = matrix.mT @ v_proj.to(matrix.dtype).reshape(heads, dim, hidden_in)
    folded_v = folded_v.unflatten(0, (-1, basis.together)).sum(1)
    per_head = o_proj.to(matrix.dtype).reshape(hidden_out, heads, -1, dim)
    folded_o = torch.einsum("ohgd,hdr->ohgr", per_head, dual)
    return (
        folded_v.reshape(-1, hidden_in).to(v_proj.dtype),
        folded_o.reshape(hidden_out, -1).to(o_proj.dtype),
    )
