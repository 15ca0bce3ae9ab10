"""TOVA: tokens that the newest query attends to."""

from dataclasses import dataclass, replace
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from kv_policy import Capabilities, Evictor, LayerView, Observe


@dataclass(frozen=True)
class TOVA(Evictor):
    """Keep the tokens that the newest query attends to most, the same in all heads of a layer.

    A token's score is the attention it receives from the last query of a prompt, or from the
    generated one, averaged over all heads of the layer. No token is protected and no score is
    carried over: at every step, once the budget is full, the token with the lowest score is
    evicted, even the newest (`src/tova_cache.py` of the authors' repository, read).

    All heads of a layer hold the same tokens in the same slots, so their scores are averaged slot
    by slot.
    """

    name: ClassVar[str] = "tova"
    source: ClassVar[str] = "TOVA, Oren et al., 2024, https://arxiv.org/abs/2401.06104"
    decode = "step"  # each generated token evicts another once the budget is full
    observe = Observe(last=1, generated=True)  # the newest query
    scores_last = True

    @property
    def capabilities(self) -> Capabilities:
        """All heads of a layer decide together, so heads cannot be sharded."""
        return replace(super().capabilities, splits_heads=False)

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return the newest query's attention to a token, averaged over the heads."""
        assert view.mass is not None  # it is observed
        return view.mass.mean(1, keepdim=True).expand_as(view.mass)
