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

    A value adds to the output as much as its norm allows. Nothing has to be observed for it, so a
    prompt is compressed without an attention probability leaving the kernel. The paper weighs the
    norm with the attention a token gets; this is the norm alone. Values of sinks are small, so
    `sinks` and `recent` keep some tokens at both ends whatever their norms are.
    """

    name: ClassVar[str] = "vnorm"
    source: ClassVar[str] = "after VATP, Guo et al., 2024, https://arxiv.org/abs/2406.12335"
    reads = frozenset({"values"})

    sinks: Annotated[int, Meta(ge=0, description="first tokens, always kept")] = 4
    recent: Annotated[int, Meta(ge=0, description="last tokens of the prompt, always kept")] = 0

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Give a token the norm of its value; what is protected, infinity."""
        assert view.values is not None, "a host gives the values that `reads` asks for"
        return self.protect(view.values.norm(dim=-1), view)
