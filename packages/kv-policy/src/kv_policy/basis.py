"""Per-head bases: the cache stores a vector's coordinates in the basis of its KV head."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class HeadBasis:
    """Linear maps of a layer's KV heads; each stored head keeps its first `rank` coordinates.

    Columns of `matrix` past a head's rank are zero, so a product with the whole matrix is correct
    for every head while pages store only `rank` numbers per vector. Queries and attention outputs
    are mapped by `dual`: (q·dual)·(k·matrix) approximates q·k. With orthonormal columns the dual is
    the matrix itself.

    `together` consecutive KV heads may be stored as one: the basis then spans their concatenated
    vectors, a stored vector is the sum of their coordinates, and their GQA groups merge into one.
    """

    matrix: Float[Tensor, "H D R"]
    rank: tuple[int, ...]  # of each stored head
    dual: Float[Tensor, "H D R"] | None = None  # None: the matrix
    together: int = 1

    def __post_init__(self) -> None:
        """Check the ranks against the matrix and that columns past a rank are zero."""
        heads, dim, width = self.matrix.shape
        if self.together < 1 or heads % self.together:
            raise ValueError(
                f"{heads} KV heads cannot be stored {self.together} at a time; choose a divisor"
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
                f"the dual has shape {tuple(self.dual.shape)}; it must match the matrix, "
                f"{tuple(self.matrix.shape)}"
            )
        column = torch.arange(width, device=self.matrix.device)
        rank = torch.tensor(self.rank, device=column.device).repeat_interleave(self.together)
        past = column >= rank[:, None]
        if any((m.mT[past] != 0).any() for m in (self.matrix, self.dual) if m is not None):
            raise ValueError("columns past a head's rank must be zero")

    def project(self, x: Float[Tensor, "B H L D"]) -> Float[Tensor, "B H2 L R"]:
        """Return the coordinates of keys or values, one row per stored head."""
        found = x @ self.matrix.to(x.dtype)
        return found if self.together == 1 else found.unflatten(1, (-1, self.together)).sum(2)

    def project_queries(self, q: Float[Tensor, "B H G L D"]) -> Float[Tensor, "B H2 G2 L R"]:
        """Project queries so that their products with stored keys are the attention logits."""
        found = q @ self._dual(q.dtype)
        if self.together == 1:
            return found
        by_stored: Tensor = found.unflatten(1, (-1, self.together)).flatten(2, 3)
        return by_stored

    def undo(self, out: Float[Tensor, "B H2 G2 L R"]) -> Float[Tensor, "B H G L D"]:
        """Map attention outputs over stored values, one per query, back to the value space."""
        if self.together > 1:
            out = out.unflatten(2, (self.together, -1)).flatten(1, 2)
        return out @ self._dual(out.dtype).mT

    def to(self, device: torch.device, dtype: torch.dtype) -> "HeadBasis":
        """Return the same maps on another device and in another dtype."""
        dual = None if self.dual is None else self.dual.to(device, dtype)
        return HeadBasis(self.matrix.to(device, dtype), self.rank, dual, self.together)

    def _dual(self, dtype: torch.dtype) -> Float[Tensor, "H 1 D R"]:
        return (self.matrix if self.dual is None else self.dual).to(dtype)[:, None]


@dataclass(frozen=True)
class LayerBasis:
    """The maps of one layer: k·R and q·R for keys; values are mapped back once after attention."""

    key: HeadBasis | None = None
    value: HeadBasis | None = None

    def __post_init__(self) -> None:
        """Check that keys and values use the same stored heads.

        Raises:
            ValueError: keys and values store different numbers of KV heads together.
        """
        if self._together(self.key) != self._together(self.value):
            raise ValueError(
                f"keys of {self._together(self.key)} KV heads are stored together and values of "
                f"{self._together(self.value)}; a page holds both, so give the same number"
            )

    @property
    def together(self) -> int:
        """Number of KV heads stored as one."""
        return self._together(self.key)

    @staticmethod
    def _together(basis: HeadBasis | None) -> int:
        return 1 if basis is None else basis.together


def fold_values(
    basis: HeadBasis,
    v_proj: Float[Tensor, "HD hidden"],
    o_proj: Float[Tensor, "hidden QD"],
) -> tuple[Float[Tensor, "HR hidden"], Float[Tensor, "hidden QR"]]:
    """Fold a value basis into the projections before and after attention (ZACK section 4.1).

    The new `v_proj` outputs coordinates (R per stored head) and the new `o_proj` takes them, so
    attention runs in the reduced space without a per-token rotation back. Exact for a basis of full
    rank.

    Args:
        basis: value maps, D to R, one per KV head.
        v_proj: weight of the value projection, rows by KV head and dimension.
        o_proj: weight of the output projection, columns by query head and dimension.

    Raises:
        ValueError: the weights do not match the heads and dimensions of the basis.
    """
    heads, dim, _ = basis.matrix.shape
    if v_proj.shape[0] != heads * dim or o_proj.shape[1] % (heads * dim):
        raise ValueError(
            f"v_proj has {v_proj.shape[0]} rows and o_proj {o_proj.shape[1]} columns; a basis of "
            f"{heads} heads of {dim} dimensions needs {heads * dim} rows and a multiple in columns"
        )
    # Float64 is cheap here; a basis of full rank then folds to within the weights' own rounding.
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
