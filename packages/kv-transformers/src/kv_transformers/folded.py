"""Linear layers with a folded basis, and the state they share."""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from kv_policy import Basis, HeadBasis, LayerBasis
from kv_runtime import Folded
from kv_transformers.running import current

FOLDED: Final = "_kv_transformers_folded"  # attribute of a folded model


@dataclass(frozen=True)
class Packing:
    """The layout of a layer's values and outputs between the folded projections.

    A stored head keeps its first `rank` of `width` coordinates. The outputs of its query heads are
    concatenated without the others. So are values, unless the model's code views them head by head:
    then each head has `dim` elements, padded with zeros.
    """

    rank: tuple[int, ...]  # per stored head
    width: int
    dim: int
    values: Int[Tensor, " n"] | None  # indices of values in [heads, width]; None: head by head
    output: Int[Tensor, " m"]  # indices of outputs in [heads, group, width]

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
        """Compute the indices; `group` is the number of query heads per stored head."""
        values, output = _places(rank, width, 1), _places(rank, width, group)
        return cls(rank, width, dim, values.to(device) if packed else None, output.to(device))

    @property
    def alike(self) -> bool:
        """Whether all heads have the same rank, so that no indexing is needed."""
        return len(set(self.rank)) == 1

    def unpack(self, x: Float[Tensor, "B H L D"]) -> Float[Tensor, "B H2 L R"]:
        """Convert values as viewed by the model's code to coordinates padded with zeros."""
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
        """Pack attention's output in coordinates as the input of the folded output projection."""
        by_token = out.permute(0, 3, 1, 2, 4)
        if self.alike:
            return by_token[..., : self.rank[0]].flatten(2)
        return by_token.flatten(2)[..., self.output]

    def rows(self, x: Float[Tensor, "HR n"]) -> Float[Tensor, "_ n"]:
        """Pack the rows of a value projection with `width` coordinates per head."""
        if self.values is None:
            by_head = x.unflatten(0, (len(self.rank), self.width))
            return pad(by_head, (0, 0, 0, self.dim - self.width)).flatten(0, 1)
        # The model views the output as heads of its own dimension, so pad to whole heads.
        return pad(x[self.values.to(x.device)], (0, 0, 0, -len(self.values) % self.dim))


def _places(rank: tuple[int, ...], width: int, group: int) -> Int[Tensor, " n"]:
    ranks = torch.tensor(rank).repeat_interleave(group)
    return (torch.arange(width) < ranks[:, None]).flatten().nonzero()[:, 0]


@dataclass(frozen=True)
class FoldState:
    """The basis folded into a model's projections."""

    policy: str
    basis: Basis
    bound: tuple[LayerBasis, ...]  # by layer, at the time of folding
    what: Folded
    packing: tuple[Packing, ...]  # by layer


class FoldedLinear(nn.Linear):
    """A projection with a basis folded into its weights."""

    state: FoldState

    @classmethod
    def of(
        cls, old: nn.Linear, weight: Tensor, bias: Tensor | None, state: FoldState
    ) -> "FoldedLinear":
        """Create a layer with these weights, with the dtype and device of the old layer."""
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
        """Project, during a pass over a compressed cache.

        Raises:
            ValueError: no such pass is running, so the model would misread coordinates as vectors.
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
        """Raise, because the folded weights are not the model's.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"{prefix.rstrip('.')} holds a policy's basis, so its weights are not the model's; "
            "restore the model before saving"
        )


def turned_rows(
    basis: HeadBasis, weight: Float[Tensor, "HD n"], dual: bool
) -> Float[Tensor, "HR n"]:
    """Return the weight of a projection to heads that outputs coordinates; in float64.

    Args:
        basis: maps of the heads.
        weight: rows by KV head (or by query head, grouped by KV head) and dimension.
        dual: use the dual basis, for vectors multiplied with stored ones, instead of the basis.
    """
    heads, dim, _ = basis.matrix.shape
    chosen = basis.dual if dual and basis.dual is not None else basis.matrix
    matrix = chosen.to(weight.device, torch.float64)
    rows = weight.double().reshape(heads, -1, dim, weight.shape[1])
    turned = matrix.mT[:, None] @ rows
    if not dual:
        turned = turned.unflatten(0, (-1, basis.together)).sum(1)
    return turned.flatten(0, 2)
