"""A random sample of the tokens that a gate's calibration has seen, of bounded size."""

from collections.abc import Mapping
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from kv_evict.gate_fit import Examples
from kv_policy import CacheShape

_STORED: Final = torch.bfloat16  # of keys and values: twice as many examples fit into memory
_NAMES: Final = ("keys", "values", "targets", "priorities")


class Sample:
    """A uniform sample of tokens: those of the lowest random priorities.

    Priorities depend only on how many tokens were seen before, so all layers keep the same tokens,
    and a resumed calibration keeps those of an uninterrupted one.
    """

    def __init__(self, shape: CacheShape, size: int) -> None:
        """Start empty; at most `size` tokens are kept."""
        self.shape, self.size = shape, size
        heads = shape.kv_heads
        nothing = (
            torch.zeros(heads, 0, shape.key_dim, dtype=_STORED),
            torch.zeros(heads, 0, shape.value_dim, dtype=_STORED),
            torch.zeros(heads, 0, dtype=torch.float32),
            torch.zeros(0, dtype=torch.float64),
        )
        self._kept = [nothing] * shape.layers
        self._seen = [0] * shape.layers

    def add(
        self,
        layer: int,
        key: Float[Tensor, "B H T D"],
        value: Float[Tensor, "B H T Dv"],
        target: Float[Tensor, "B H T"],
    ) -> None:
        """Add tokens of a layer, and drop those of the highest priorities."""
        count = key.shape[0] * key.shape[2]
        chance = torch.Generator().manual_seed(self._seen[layer])
        self._seen[layer] += count
        drawn = torch.rand(count, generator=chance, dtype=torch.float64)
        # Only new tokens that may stay are copied.
        limit = self._kept[layer][3]
        few = len(limit) < self.size
        new = (drawn < (torch.inf if few or not len(limit) else float(limit.max()))).nonzero()[:, 0]
        where = new.to(key.device)
        added = (
            key.transpose(0, 1).flatten(1, 2)[:, where].to("cpu", _STORED),
            value.transpose(0, 1).flatten(1, 2)[:, where].to("cpu", _STORED),
            target.transpose(0, 1).flatten(1)[:, where].to("cpu", torch.float32),
        )
        *vectors, priority = self._kept[layer]
        both = [torch.cat(pair, 1) for pair in zip(vectors, added, strict=True)]
        priority = torch.cat((priority, drawn[new]))
        if len(priority) > self.size:
            stay = priority.topk(self.size, largest=False).indices.sort().values
            both, priority = [x[:, stay] for x in both], priority[stay]
        key_kept, value_kept, target_kept = both
        self._kept[layer] = (key_kept, value_kept, target_kept, priority)

    def examples(self) -> Examples:
        """Return the tokens of all layers."""
        key, value, target, _ = (torch.stack(x) for x in zip(*self._kept, strict=True))
        return Examples(key, value, target)

    def state(self) -> dict[str, Tensor]:
        """Return the kept tokens of all layers, which have seen the same tokens.

        Raises:
            ValueError: some layers have seen more tokens than others.
        """
        if len(set(self._seen)) > 1:
            raise ValueError("layers have seen different tokens; feed all layers the same first")
        each = zip(*self._kept, strict=True)
        found = {name: torch.stack(x) for name, x in zip(_NAMES, each, strict=True)}
        return found | {"seen": torch.tensor(self._seen[0])}

    def fits(self, state: Mapping[str, Tensor]) -> bool:
        """Return whether a state has these sizes, but for the number of tokens."""
        mine = self.state()
        if not mine.keys() <= state.keys() or state["seen"].shape != mine["seen"].shape:
            return False
        count = state["priorities"].shape[-1]
        for name in _NAMES:
            here, there = mine[name], state[name]
            sizes = list(here.shape)
            sizes[1 if name == "priorities" else 2] = count
            if here.dtype != there.dtype or list(there.shape) != sizes:
                return False
        return count <= self.size

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Resume from a state."""
        self._kept = [
            (
                state["keys"][layer].clone(),
                state["values"][layer].clone(),
                state["targets"][layer].clone(),
                state["priorities"][layer].clone(),
            )
            for layer in range(self.shape.layers)
        ]
        self._seen = [int(state["seen"])] * self.shape.layers
