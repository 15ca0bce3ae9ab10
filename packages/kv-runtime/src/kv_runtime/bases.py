"""The bases of all layers of a cache: what is stored has coordinates, and heads have dimensions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from kv_policy import Basis, CacheShape, HeadBasis, LayerBasis

Folded: TypeAlias = frozenset[Literal["keys", "values"]]  # what a model gives as coordinates


@dataclass(frozen=True)
class Bases:
    """The maps between a model's vectors and what a cache stores.

    Coordinates of all layers are as long as the longest and end with zeros where a head keeps
    fewer. What is `folded` into the model's weights comes as coordinates already, queries with
    keys, and is left so.
    """

    key_maps: tuple[HeadBasis | None, ...]  # by layer; None: none, or folded
    value_maps: tuple[HeadBasis | None, ...]
    stored: CacheShape  # heads that are stored, and dimensions of the longest coordinates
    key_dims: tuple[tuple[int, ...], ...]  # of each layer and head that is stored
    value_dims: tuple[tuple[int, ...], ...]
    folded: Folded = frozenset()

    @classmethod
    def of(
        cls, basis: Basis, shape: CacheShape, device: torch.device, folded: Folded = frozenset()
    ) -> "Bases":
        """Bind a policy's basis to a cache.

        Raises:
            ValueError: layers store different numbers of heads together.
        """
        bound = [basis.bind(layer, shape) for layer in range(shape.layers)]
        together = {layer.together for layer in bound}
        if len(together) > 1:
            raise ValueError(
                f"layers store {', '.join(map(str, sorted(together)))} KV heads together; a cache "
                "needs the same number in all"
            )
        size = together.pop()
        heads = shape.kv_heads // size
        keys = tuple(_ranks(layer.key, heads, shape.key_dim) for layer in bound)
        values = tuple(_ranks(layer.value, heads, shape.value_dim) for layer in bound)
        widths = max(map(max, keys)), max(map(max, values))

        def fitted(found: HeadBasis | None, width: int, done: bool) -> HeadBasis | None:
            return None if found is None or done else widened(found, width).to(device, shape.dtype)

        return cls(
            tuple(fitted(layer.key, widths[0], "keys" in folded) for layer in bound),
            tuple(fitted(layer.value, widths[1], "values" in folded) for layer in bound),
            replace(
                shape,
                kv_heads=heads,
                group=shape.group * size,
                key_dim=widths[0],
                value_dim=widths[1],
                first_head=shape.first_head // size,
                rope=None,  # coordinates cannot be turned to other positions
            ),
            keys,
            values,
            folded,
        )

    @property
    def kinds(self) -> tuple[tuple[tuple[int, ...], ...], tuple[CacheShape, ...]]:
        """Say of which kind each head is, and give the shape of each kind, longest first."""
        pairs = [
            list(zip(keys, values, strict=True))
            for keys, values in zip(self.key_dims, self.value_dims, strict=True)
        ]
        found = sorted({pair for layer in pairs for pair in layer}, key=lambda p: (-sum(p), p))
        kind = tuple(tuple(found.index(pair) for pair in layer) for layer in pairs)
        return kind, tuple(replace(self.stored, key_dim=k, value_dim=v) for k, v in found)

    @property
    def nbytes(self) -> int:
        """Memory of the maps."""
        maps = (*self.key_maps, *self.value_maps)
        held = [x for m in maps if m is not None for x in (m.matrix, m.dual) if x is not None]
        return sum(x.nbytes for x in held)

    def same_as(self, other: "Bases") -> bool:
        """Whether vectors are stored alike, number by number."""
        pairs = zip(
            (*self.key_maps, *self.value_maps), (*other.key_maps, *other.value_maps), strict=True
        )
        dims = (self.key_dims, self.value_dims) == (other.key_dims, other.value_dims)
        return dims and self.folded == other.folded and all(_same(a, b) for a, b in pairs)

    def queries(self, layer: int, q: Float[Tensor, "B H G L D"]) -> Float[Tensor, "B H2 G2 L R"]:
        """Coordinates of queries."""
        basis = self.key_maps[layer]
        return _to_width(q if basis is None else basis.project_queries(q), self.stored.key_dim)

    def keys(self, layer: int, key: Float[Tensor, "B H L D"]) -> Float[Tensor, "B H2 L R"]:
        """Coordinates of keys."""
        basis = self.key_maps[layer]
        return _to_width(key if basis is None else basis.project(key), self.stored.key_dim)

    def values(self, layer: int, value: Float[Tensor, "B H L Dv"]) -> Float[Tensor, "B H2 L R"]:
        """Coordinates of values."""
        basis = self.value_maps[layer]
        return _to_width(value if basis is None else basis.project(value), self.stored.value_dim)

    def undone(
        self, layer: int, out: Float[Tensor, "B H2 G2 L R"], value_dim: int
    ) -> Float[Tensor, "B H G L D"]:
        """The output in the space of values, unless the output projection reads coordinates."""
        basis = self.value_maps[layer]
        if basis is not None:
            return basis.undo(out)
        return out if "values" in self.folded else out[..., :value_dim]


def same_maps(mine: Sequence[LayerBasis], theirs: Sequence[LayerBasis]) -> bool:
    """Whether all layers have the same maps, number by number."""
    return all(
        _same(a.key, b.key) and _same(a.value, b.value) for a, b in zip(mine, theirs, strict=True)
    )


def _same(mine: HeadBasis | None, theirs: HeadBasis | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    pairs = ((mine.matrix, theirs.matrix), (mine.dual, theirs.dual))
    return (mine.rank, mine.together) == (theirs.rank, theirs.together) and all(
        a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs
    )


def _ranks(basis: HeadBasis | None, heads: int, dim: int) -> tuple[int, ...]:
    return (dim,) * heads if basis is None else basis.rank


def widened(basis: HeadBasis, width: int) -> HeadBasis:
    """The same maps with as many columns; those that are added are zero."""
    dual = None if basis.dual is None else _to_width(basis.dual, width)
    return replace(basis, matrix=_to_width(basis.matrix, width), dual=dual)


def _to_width(x: Tensor, width: int) -> Tensor:
    """The same with as many numbers in a vector; what is cut off is zero, as what is added is."""
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))
