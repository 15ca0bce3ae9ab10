"""Linear layers that a basis is folded into, and what they know of it."""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from kv_policy import Basis, HeadBasis, LayerBasis
from kv_runtime import Folded
from kv_transformers.running import current

FOLDED: Final = "_kv_transformers_folded"  # an attribute of a model whose projections hold a basis


@dataclass(frozen=True)
class Packing:
    """How a layer's values and output lie between the folded projections.

    A stored head keeps its first coordinates, `rank` of `width`. Its query heads' outputs come side
    by side without the others. So do values, unless the model's code views them head by head: then
    each head is `dim` long and ends with zeros.
    """

    rank: tuple[int, ...]  # of each stored head
    width: int
    dim: int
    values: Int[Tensor, " n"] | None  # where in [heads, width] values are; None: head by head
    output: Int[Tensor, " m"]  # where in [heads, group, width] outputs are

    @classmethod
    def of(
        cls,
        rank: tuple[int, ...],
        width: int,
        dim: int,
        group: int,
        packed: bool,
        device: torch.device,
    ) -> "Packing":
        """List the places; `group` is query heads of a stored head."""
        values, output = _places(rank, width, 1), _places(rank, width, group)
        return cls(rank, width, dim, values.to(device) if packed else None, output.to(device))

    @property
    def alike(self) -> bool:
        """Whether all heads keep the same, so that nothing has to be picked out by its place."""
        return len(set(self.rank)) == 1

    def unpack(self, x: Float[Tensor, "B H L D"]) -> Float[Tensor, "B H2 L R"]:
        """Values as the model's code viewed them, as coordinates padded with zeros."""
        if self.values is None:
            return x[..., : self.width]
        flat = x.transpose(1, 2).flatten(2)[..., : len(self.values)]
        if self.alike:
            by_head: Tensor = flat.unflatten(2, (len(self.rank), -1)).transpose(1, 2)
            more = self.width - self.rank[0]
            return pad(by_head, (0, more)) if more else by_head
        whole = flat.new_zeros(*flat.shape[:2], len(self.rank) * self.width)
        whole[..., self.values] = flat
        by_head = whole.unflatten(2, (len(self.rank), self.width))
        return by_head.transpose(1, 2)

    def pack(self, out: Float[Tensor, "B H2 G2 L R"]) -> Float[Tensor, "B L m"]:
        """Attention's output in coordinates, as the folded output projection reads it."""
        by_token = out.permute(0, 3, 1, 2, 4)
        if self.alike:
            return by_token[..., : self.rank[0]].flatten(2)
        return by_token.flatten(2)[..., self.output]

    def rows(self, x: Float[Tensor, "HR n"]) -> Float[Tensor, "_ n"]:
        """Rows of a value projection that gives `width` coordinates a head, as they are needed."""
        if self.values is None:
            by_head = x.unflatten(0, (len(self.rank), self.width))
            return pad(by_head, (0, 0, 0, self.dim - self.width)).flatten(0, 1)
        # The model views what comes out as heads of its own dimension, so there are whole ones.
        return pad(x[self.values.to(x.device)], (0, 0, 0, -len(self.values) % self.dim))


def _places(rank: tuple[int, ...], width: int, group: int) -> Int[Tensor, " n"]:
    ranks = torch.tensor(rank).repeat_interleave(group)
    return (torch.arange(width) < ranks[:, None]).flatten().nonzero()[:, 0]


@dataclass(frozen=True)
class FoldState:
    """What a model's projections hold of a policy's basis."""

    policy: str
    basis: Basis
    bound: tuple[LayerBasis, ...]  # by layer, as the basis was when it was folded
    what: Folded
    packing: tuple[Packing, ...]  # by layer


class FoldedLinear(nn.Linear):
    """A projection whose weights hold a basis."""

    state: FoldState

    @classmethod
    def of(
        cls, old: nn.Linear, weight: Tensor, bias: Tensor | None, state: FoldState
    ) -> "FoldedLinear":
        """Make one with these weights, of the dtype and on the device of the old one."""
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        new.in_features, new.out_features = weight.shape[1], weight.shape[0]
        kept = old.weight
        new.weight = nn.Parameter(weight.to(kept.device, kept.dtype), kept.requires_grad)
        new.register_parameter(
            "bias",
            None if bias is None else nn.Parameter(bias.to(kept.device, kept.dtype), False),
        )
        new.state = state
        return new.train(old.training)

    def forward(self, input: Tensor) -> Tensor:
        """Project, within a pass over a compressed cache.

        Raises:
            ValueError: there is none, so coordinates would be taken for the model's own vectors.
        """
        if current() is None:
            raise ValueError(
                "the model's projections are folded for a policy's basis; pass a CompressedCache "
                "of that policy as the cache, or restore the model"
            )
        return super().forward(input)

    def _save_to_state_dict(
        self, destination: dict[str, object], prefix: str, keep_vars: bool
    ) -> None:
        """Refuse to be saved: loaded again, these weights would not be the model's.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"{prefix.rstrip('.')} holds a policy's basis, and what would be saved is not the "
            "model; restore the model first"
        )


def turned_rows(
    basis: HeadBasis, weight: Float[Tensor, "HD n"], dual: bool
) -> Float[Tensor, "HR n"]:
    """The weight of a projection to heads, giving coordinates; in float64.

    Args:
        basis: maps of the heads.
        weight: rows by KV head (or by query head, those of a KV head side by side) and dimension.
        dual: give the coordinates of what meets stored vectors, rather than those that are stored.
    """
    heads, dim, _ = basis.matrix.shape
    chosen = basis.dual if dual and basis.dual is not None else basis.matrix
    matrix = chosen.to(weight.device, torch.float64)
    rows = weight.double().reshape(heads, -1, dim, weight.shape[1])
    turned = matrix.mT[:, None] @ rows
    if not dual:
        turned = turned.unflatten(0, (-1, basis.together)).sum(1)
    return turned.flatten(0, 2)
