"""KeyDiff: keys that differ from the mean key."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from kv_policy import Evictor, LayerView


@dataclass(frozen=True)
class KeyDiff(Evictor):
    """Keep the keys with the lowest cosine similarity to the head's mean key.

    A token's score is minus the cosine between its key and the mean of the head's normalized keys,
    those stored and those of the pass (`keydiff_press.py` of kvpress, read). Nothing is observed
    and no token is protected; generated tokens grow the cache.
    """

    name: ClassVar[str] = "keydiff"
    source: ClassVar[str] = "KeyDiff, Park et al., 2025, https://arxiv.org/abs/2504.15364"
    reads = frozenset({"keys"})

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Compare each key with the mean; keys of empty slots are zero."""
        assert view.keys is not None  # they are read
        unit = normalize(view.keys, dim=-1)
        mean = normalize(unit.sum(2, keepdim=True), dim=-1)
        return -(unit * mean).sum(-1)
