"""The bases of all layers of a cache, which project vectors to stored coordinates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from kv_attention import RowMaps
from kv_policy import Basis, CacheShape, HeadBasis, LayerBasis
from kv_policy.tensor_files import checksum

Folded: TypeAlias = frozenset[Literal["keys", "values"]]  # vectors that a model projects itself


@dataclass(frozen=True)
class Bases:
    """The projections between a model's vectors and stored coordinates.

    Coordinates of all layers have the length of the longest, zero-padded if a head has a lower
    rank. Vectors whose basis is `folded` into the model's weights, queries together with keys, are
    already projected and remain unchanged. Values whose maps only truncate, such as those of a
    model in a folded checkpoint, have no map either: they are cut, and outputs padded with zeros.
    """

    key_maps: tuple[HeadBasis | None, ...]  # by layer; None: none, or folded
    value_maps: tuple[HeadBasis | None, ...]  # the same; None: they are truncated, too
    stored: CacheShape  # stored heads, and dimensions of the longest coordinates
    key_dims: tuple[tuple[int, ...], ...]  # rank by layer and stored head
    value_dims: tuple[tuple[int, ...], ...]
    past_rank: tuple[Bool[Tensor, "H2 1 R"] | None, ...]  # of truncated values, by layer
    folded: Folded = frozenset()

    @classmethod
    def of(
        cls, basis: Basis, shape: CacheShape, device: torch.device, folded: Folded = frozenset()
    ) -> "Bases":
        """Bind a policy's basis to a cache.

        Raises:
            ValueError: layers store different numbers of heads together, or the model's weights
                have a value basis, and this one maps values.
        """
        bound = [basis.bind(layer, shape) for layer in range(shape.layers)]
        cut = [layer.value is not None and layer.value.truncates for layer in bound]
        if shape.folded is not None:
            maps = (layer.value for layer in bound)
            if any(each is not None and not done for each, done in zip(maps, cut, strict=True)):
                raise ValueError(
                    f"{basis} maps values, but this model's weights hold the value basis "
                    f"{shape.folded} already; use the zack policy that the model was folded with, "
                    "a policy without a basis, such as k8v4, or the model as it was before"
                )
        together = {layer.together for layer in bound}
        if len(together) > 1:
            raise ValueError(
                f"layers store {', '.join(map(str, sorted(together)))} KV heads together; all "
                "layers of a cache need the same number"
            )
        size = together.pop()
        heads = shape.kv_heads // size
        keys = tuple(_ranks(layer.key, heads, shape.key_dim) for layer in bound)
        values = tuple(_ranks(layer.value, heads, shape.value_dim) for layer in bound)
        widths = max(map(max, keys)), max(map(max, values))

        moved: dict[tuple[int, int], HeadBasis] = {}  # layers may share maps

        def fitted(found: HeadBasis | None, width: int, done: bool) -> HeadBasis | None:
            if found is None or done:
                return None
            own = id(found), width
            if own not in moved:
                moved[own] = widened(found, width).to(device, shape.dtype)
            return moved[own]

        return cls(
            tuple(fitted(layer.key, widths[0], "keys" in folded) for layer in bound),
            tuple(
                fitted(layer.value, widths[1], "values" in folded or done)
                for layer, done in zip(bound, cut, strict=True)
            ),
            replace(
                shape,
                kv_heads=heads,
                group=shape.group * size,
                key_dim=widths[0],
                value_dim=widths[1],
                first_head=shape.first_head // size,
                rope=None,  # coordinates cannot be rotated to other positions
            ),
            keys,
            values,
            tuple(
                _past(rank, widths[1], device) if done and "values" not in folded else None
                for rank, done in zip(values, cut, strict=True)
            ),
            folded,
        )

    @property
    def kinds(self) -> tuple[tuple[tuple[int, ...], ...], tuple[CacheShape, ...]]:
        """The kind of each head, and the shape of each kind, longest first."""
        pairs = [
            list(zip(keys, values, strict=True))
            for keys, values in zip(self.key_dims, self.value_dims, strict=True)
        ]
        found = sorted({pair for layer in pairs for pair in layer}, key=lambda p: (-sum(p), p))
        kind = tuple(tuple(found.index(pair) for pair in layer) for layer in pairs)
        return kind, tuple(replace(self.stored, key_dim=k, value_dim=v) for k, v in found)

    @property
    def nbytes(self) -> int:
        """Bytes of the projections; those that layers share count once."""
        held = {id(m): m for m in (*self.key_maps, *self.value_maps) if m is not None}
        return sum(each.nbytes for each in held.values())

    @property
    def shifted(self) -> bool:
        """Whether keys of a layer are stored without a constant, which softmax must not notice."""
        return any(each is not None and each.shift is not None for each in self.key_maps)

    def digest(self) -> str:
        """Return the SHA-256 of all projections, in hexadecimal digits."""
        maps = {
            f"{kind}.{layer}": each
            for kind, every in (("key", self.key_maps), ("value", self.value_maps))
            for layer, each in enumerate(every)
            if each is not None
        }
        found = {
            f"{name}.{what}": x.cpu().contiguous()
            for name, each in maps.items()
            for what, x in (("matrix", each.matrix), ("dual", each.dual), ("shift", each.shift))
            if x is not None
        }
        return checksum(found)

    def same_as(self, other: "Bases") -> bool:
        """Return whether all projections are exactly equal."""
        pairs = zip(
            (*self.key_maps, *self.value_maps), (*other.key_maps, *other.value_maps), strict=True
        )
        dims = (self.key_dims, self.value_dims) == (other.key_dims, other.value_dims)
        return dims and self.folded == other.folded and all(_same(a, b) for a, b in pairs)

    def layer(self, layer: int) -> LayerBasis:
        """Return the projections of a layer."""
        return LayerBasis(self.key_maps[layer], self.value_maps[layer])

    def queries(self, layer: int, q: Float[Tensor, "B H G L D"]) -> Float[Tensor, "B H2 G2 L R"]:
        """Project queries."""
        basis = self.key_maps[layer]
        return _to_width(q if basis is None else basis.project_queries(q), self.stored.key_dim)

    def keys(self, layer: int, key: Float[Tensor, "B H L D"]) -> Float[Tensor, "B H2 L R"]:
        """Project keys."""
        basis = self.key_maps[layer]
        return _to_width(key if basis is None else basis.project(key), self.stored.key_dim)

    def values(self, layer: int, value: Float[Tensor, "B H L Dv"]) -> Float[Tensor, "B H2 L R"]:
        """Project values."""
        basis, past = self.value_maps[layer], self.past_rank[layer]
        found = _to_width(value if basis is None else basis.project(value), self.stored.value_dim)
        return found if past is None else found.masked_fill(past, 0)

    def undone(
        self, layer: int, out: Float[Tensor, "B H2 G2 L R"], value_dim: int
    ) -> Float[Tensor, "B H G L D"]:
        """Project the output back to values, unless the output projection is folded."""
        basis = self.value_maps[layer]
        if basis is not None:
            return basis.undo(out)
        return out if "values" in self.folded else _to_width(out, value_dim)

    @cached_property
    def row_maps(self) -> tuple[RowMaps | None, ...]:
        """The maps of a decode step on an engine's rows by layer, if heads are stored singly."""
        return tuple(row_maps(self.layer(i)) for i in range(len(self.key_maps)))

    def unpadded(
        self,
        layer: int,
        query: Float[Tensor, "m Q D"],
        key: Float[Tensor, "m H D"],
        value: Float[Tensor, "m H Dv"],
        output: Float[Tensor, "m Q Dv"],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return of each the dimensions that are stored, where no product is due.

        Coordinates of a folded model, and values that are truncated, are as long as its vectors.
        """
        if self.key_maps[layer] is None:
            query, key = (_first(x, self.stored.key_dim) for x in (query, key))
        if self.value_maps[layer] is None:
            value, output = (_first(x, self.stored.value_dim) for x in (value, output))
        return query, key, value, output


def row_maps(basis: LayerBasis) -> RowMaps | None:
    """Return what maps the vectors of a decode step on an engine's rows; None: nothing does.

    Raises:
        ValueError: heads are stored together, whose coordinates are sums over heads.
    """
    if basis.together > 1:
        raise ValueError(
            f"{basis.together} KV heads are stored together; rows are mapped for heads that are "
            "stored singly"
        )
    key, value = basis.key, basis.value
    if key is None and value is None:
        return None
    matrix, dual = (None, None) if key is None else key.products
    to, back = (None, None) if value is None else value.products
    shift = None if key is None else key.shift
    return RowMaps(matrix, dual, to, None if back is None else back.mT, shift)


def by_stored_head(
    query: Float[Tensor, "B H2 G2 L R"], sinks: Float[Tensor, "H G"] | None
) -> Float[Tensor, "H2 G2"] | None:
    """Return the sinks in the order of projected queries: GQA groups stored together are one."""
    return None if sinks is None else sinks.reshape(query.shape[1:3])


def same_maps(mine: Sequence[LayerBasis], theirs: Sequence[LayerBasis]) -> bool:
    """Return whether all layers have exactly equal projections."""
    return all(
        _same(a.key, b.key) and _same(a.value, b.value) for a, b in zip(mine, theirs, strict=True)
    )


def _same(mine: HeadBasis | None, theirs: HeadBasis | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    pairs = (
        (mine.matrix, theirs.matrix),
        (mine.dual, theirs.dual),
        (mine.shift, theirs.shift),
    )
    return (mine.rank, mine.together) == (theirs.rank, theirs.together) and all(
        a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs
    )


def _ranks(basis: HeadBasis | None, heads: int, dim: int) -> tuple[int, ...]:
    return (dim,) * heads if basis is None else basis.rank


def _past(rank: tuple[int, ...], width: int, device: torch.device) -> Bool[Tensor, "H2 1 R"] | None:
    """Return which coordinates are past the rank of each head; None: none of them."""
    if min(rank) == width:
        return None
    found = torch.arange(width, device="cpu") >= torch.tensor(rank, device="cpu")[:, None, None]
    return found.to(device)


def widened(basis: HeadBasis, width: int) -> HeadBasis:
    """Return the projection with `width` columns, padded with zeros."""
    dual = None if basis.dual is None else _to_width(basis.dual, width)
    return replace(basis, matrix=_to_width(basis.matrix, width), dual=dual)


def _first(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else x[..., :width]


def _to_width(x: Tensor, width: int) -> Tensor:
    """Pad vectors with zeros, or truncate trailing zeros, to `width` elements."""
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))
