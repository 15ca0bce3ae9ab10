"""Keep the tokens whose values have the largest norm."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from jaxtyping import Float
from msgspec import Meta
from torch import Tensor

from kv_policy import Evictor, LayerView


@dataclass(frozen=True)
class Vnorm(Evictor):
    """Keep the `budget` tokens of each head whose values have the largest L2 norm.

    The norm bounds a value's contribution to the output. Nothing is observed, so a prompt is
    compressed without attention probabilities leaving the kernel. The paper multiplies the norm by
    the attention a token receives; this policy uses the norm alone. Sinks have small values, so
    `sinks` and `recent` keep some tokens at both ends regardless of their norms.
    """

    name: ClassVar[str] = "vnorm"
    source: ClassVar[str] = "after VATP, Guo et al., 2024, https://arxiv.org/abs/2406.12335"
    reads = frozenset({"values"})

    sinks: Annotated[int, Meta(ge=0, description="first tokens, always kept")] = 4
    recent: Annotated[int, Meta(ge=0, description="last tokens of the prompt, always kept")] = 0

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return the norm of each value, and infinity for protected tokens."""
        assert view.values is not None, "a host supplies the vectors in `reads`"
        return self.protect(view.values.norm(dim=-1), view)
