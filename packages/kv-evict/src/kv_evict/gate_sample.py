"""A random sample of the tokens that a gate's calibration has seen, of bounded size."""

from collections.abc import Mapping
from typing import Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kv_evict.gate_fit import Examples
from kv_policy import CacheShape

_STORED: Final = torch.bfloat16  # of keys and values: twice as many examples fit into memory


class _Kept(NamedTuple):
    """The sampled tokens of a layer, or of all layers."""

    keys: Float[Tensor, "*N H T D"]  # before RoPE
    values: Float[Tensor, "*N H T Dv"]
    targets: Float[Tensor, "*N H T"]  # logarithms of target scores
    priorities: Float[Tensor, "*N T"]


class Sample:
    """A uniform sample of tokens: those of the lowest random priorities.

    Priorities depend only on how many tokens were seen before, so all layers keep the same tokens,
    and a resumed calibration keeps those of an uninterrupted one.
    """

    def __init__(self, shape: CacheShape, size: int) -> None:
        """Start empty; at most `size` tokens are kept."""
        self.shape, self.size = shape, size
        self._kept = [self._nothing()] * shape.layers
        self._seen = [0] * shape.layers

    def add(
        self,
        layer: int,
        key: Float[Tensor, "B H T D"],
        value: Float[Tensor, "B H T Dv"],
        target: Float[Tensor, "B H T"],
    ) -> None:
        """Add tokens of a layer, and drop those of the highest priorities.

        Args:
            layer: index of the layer.
            key: before RoPE.
            value: as the model computes it.
            target: logarithms of target scores.
        """
        count, old = key.shape[0] * key.shape[2], self._kept[layer]
        chance = torch.Generator().manual_seed(self._seen[layer])
        self._seen[layer] += count
        drawn = torch.rand(count, generator=chance, dtype=torch.float64)
        priorities, first = torch.cat((old.priorities, drawn)), len(old.priorities)
        stay = priorities.topk(min(self.size, len(priorities)), largest=False).indices.sort().values
        # Of the new tokens only those that stay are copied from the device.
        kept, new = stay[stay < first], (stay[stay >= first] - first).to(key.device)

        def both(before: Tensor, given: Tensor) -> Tensor:
            fresh = given.transpose(0, 1).flatten(1, 2)[:, new].to("cpu", before.dtype)
            return torch.cat((before[:, kept], fresh), 1)

        self._kept[layer] = _Kept(
            both(old.keys, key),
            both(old.values, value),
            both(old.targets, target),
            priorities[stay],
        )

    def examples(self) -> Examples:
        """Return the tokens of all layers."""
        all_layers = self._stacked()
        return Examples(all_layers.keys, all_layers.values, all_layers.targets)

    def state(self) -> dict[str, Tensor]:
        """Return the kept tokens of all layers, which have seen the same tokens.

        Raises:
            ValueError: some layers have seen more tokens than others.
        """
        if len(set(self._seen)) > 1:
            raise ValueError("layers have seen different tokens; feed all layers the same first")
        return self._stacked()._asdict() | {"seen": torch.tensor(self._seen[0])}

    def fits(self, state: Mapping[str, Tensor]) -> bool:
        """Return whether a state has these sizes, but for the number of tokens."""
        if not {*_Kept._fields, "seen"} <= state.keys():
            return False
        count, layers = state["priorities"].shape[-1], self.shape.layers
        empty = self._nothing()._asdict()
        right = {
            name: (x.dtype, (layers, *(n or count for n in x.shape))) for name, x in empty.items()
        }
        there = {name: (state[name].dtype, tuple(state[name].shape)) for name in empty}
        return there == right and count <= self.size

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Resume from a state."""
        layers = zip(*(state[name].unbind() for name in _Kept._fields), strict=True)
        self._kept = [_Kept(*(x.clone() for x in layer)) for layer in layers]
        self._seen = [int(state["seen"])] * self.shape.layers

    def _nothing(self) -> _Kept:
        heads = self.shape.kv_heads
        return _Kept(
            torch.zeros(heads, 0, self.shape.key_dim, dtype=_STORED),
            torch.zeros(heads, 0, self.shape.value_dim, dtype=_STORED),
            torch.zeros(heads, 0, dtype=torch.float32),
            torch.zeros(0, dtype=torch.float64),
        )

    def _stacked(self) -> _Kept:
        return _Kept(*(torch.stack(x) for x in zip(*self._kept, strict=True)))
