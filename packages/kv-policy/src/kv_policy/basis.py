"""Per-head bases: the cache stores a vector's coordinates in the basis of its KV head."""

from dataclasses import dataclass
from functools import cached_property

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

    A `shift` is subtracted from vectors before they are mapped. Subtracted from all keys of a head,
    it changes the logits of a query by one number, to which softmax is invariant, but not with
    a soft cap or sinks.

    Maps that are one matrix for all heads, expanded over them, take one product for all.
    """

    matrix: Float[Tensor, "H D R"]
    rank: tuple[int, ...]  # of each stored head
    dual: Float[Tensor, "H D R"] | None = None  # None: the matrix
    together: int = 1
    shift: Float[Tensor, "H D"] | None = None  # of keys; None: zero

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
        if self.shift is not None and self.shift.shape != (heads, dim):
            raise ValueError(
                f"the shift has shape {tuple(self.shift.shape)}; it must be a vector of each head, "
                f"({heads}, {dim})"
            )
        column = torch.arange(width, device=self.matrix.device)
        rank = torch.tensor(self.rank, device=column.device).repeat_interleave(self.together)
        past = column >= rank[:, None]
        if any((m.mT[past] != 0).any() for m in (self.matrix, self.dual) if m is not None):
            raise ValueError("columns past a head's rank must be zero")

    @classmethod
    def truncating(cls, dim: int, rank: tuple[int, ...]) -> "HeadBasis":
        """Return the maps of heads that keep the first `rank` of `dim` dimensions as they are."""
        return cls(_first(dim, max(rank), rank), rank)

    @property
    def truncates(self) -> bool:
        """Whether a stored vector is the first dimensions of the model's, so no product is due."""
        if self.dual is not None or self.shift is not None or self.together > 1:
            return False
        _, dim, width = self.matrix.shape
        return torch.equal(self.matrix, _first(dim, width, self.rank).to(self.matrix))

    def project(self, x: Float[Tensor, "B H L D"]) -> Float[Tensor, "B H2 L R"]:
        """Return the coordinates of keys or values, one row per stored head."""
        if self.shift is not None:
            x = x - self.shift.to(x.dtype)[:, None]
        found = _product(x, self._map)
        return found if self.together == 1 else found.unflatten(1, (-1, self.together)).sum(2)

    def project_queries(self, q: Float[Tensor, "B H G L D"]) -> Float[Tensor, "B H2 G2 L R"]:
        """Project queries so that their products with stored keys are the attention logits."""
        found = _product(q, self._dual_map)
        if self.together == 1:
            return found
        by_stored: Tensor = found.unflatten(1, (-1, self.together)).flatten(2, 3)
        return by_stored

    def undo(self, out: Float[Tensor, "B H2 G2 L R"]) -> Float[Tensor, "B H G L D"]:
        """Map attention outputs over stored values, one per query, back to the value space."""
        if self.together > 1:
            out = out.unflatten(2, (self.together, -1)).flatten(1, 2)
        return _product(out, self._dual_map.mT)

    def to(self, device: torch.device, dtype: torch.dtype) -> "HeadBasis":
        """Return the same maps on another device and in another dtype."""
        dual = None if self.dual is None else _moved(self.dual, device, dtype)
        shift = None if self.shift is None else self.shift.to(device, dtype)
        return HeadBasis(_moved(self.matrix, device, dtype), self.rank, dual, self.together, shift)

    @property
    def nbytes(self) -> int:
        """Bytes of the maps; those that are one for all heads count once."""
        held = [_one_if_alike(x) for x in (self.matrix, self.dual) if x is not None]
        return sum(x.nbytes for x in (*held, self.shift) if x is not None)

    @property
    def products(self) -> tuple[Float[Tensor, "*H D R"], Float[Tensor, "*H1 D R"]]:
        """The matrix and the dual as they are held: one for all heads if these have the same."""
        return self._map, _one_if_alike(self.matrix if self.dual is None else self.dual)

    # Cached: a step uses them in every layer.
    @cached_property
    def _map(self) -> Float[Tensor, "*H D R"]:
        return _one_if_alike(self.matrix)

    @cached_property
    def _dual_map(self) -> Float[Tensor, "*H1 D R"]:
        found = _one_if_alike(self.matrix if self.dual is None else self.dual)
        return found if found.ndim == 2 else found[:, None]


def _first(dim: int, width: int, rank: tuple[int, ...]) -> Float[Tensor, "H D R"]:
    """Return the identity of each head without the columns past its rank."""
    # vLLM changes torch's default dtype and device while a model is loaded.
    where, count = torch.device("cpu"), torch.tensor(rank, device="cpu")
    kept = torch.arange(width, device=where) < count[:, None]
    return torch.eye(dim, width, dtype=torch.float32, device=where) * kept[:, None]


def _one_if_alike(matrix: Float[Tensor, "H D R"]) -> Float[Tensor, "*H D R"]:
    """Return the one matrix that is expanded over all heads, if it is."""
    return matrix[0] if matrix.stride(0) == 0 else matrix


def _product(x: Float[Tensor, "*S D"], matrix: Float[Tensor, "*T D R"]) -> Float[Tensor, "*U R"]:
    # On a CPU, products of few rows in half precision take several times as long as in float32.
    if x.itemsize == 2 and matrix.ndim == 2 and matrix.dtype == torch.float32:
        return (x.float() @ matrix).to(x.dtype)
    return x @ matrix.to(x.dtype)


def _moved(
    matrix: Float[Tensor, "H D R"], device: torch.device, dtype: torch.dtype
) -> Float[Tensor, "H D R"]:
    """Move maps; one for all heads is in float32 on a CPU, see `_product`."""
    one = _one_if_alike(matrix)
    if one.ndim == 2 and device.type == "cpu" and dtype.itemsize == 2:
        dtype = torch.float32
    return one.to(device, dtype).expand(matrix.shape)


@dataclass(frozen=True)
class LayerBasis:
    """The maps of one layer: k·R and q·R for keys; values are mapped back once after attention."""

    key: HeadBasis | None = None
    value: HeadBasis | None = None

    def __post_init__(self) -> None:
        """Check that keys and values use the same stored heads, and that only keys are shifted.

        Raises:
            ValueError: keys and values store different numbers of KV heads together, or values have
                a shift, which attention would have to add again.
        """
        if self.value is not None and self.value.shift is not None:
            raise ValueError("values have a shift; only keys may have one")
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
