"""Keep the tokens whose keys have the smallest norm."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from jaxtyping import Float
from msgspec import Meta
from torch import Tensor

from kv_policy import Evictor, LayerView, protect


@dataclass(frozen=True)
class Knorm(Evictor):
    """Keep the `budget` tokens of each head whose keys have the smallest L2 norm.

    Keys of small norm tend to be attended to most. Nothing has to be observed for it, so a prompt
    is compressed without an attention probability leaving the kernel. The paper protects no token;
    `sinks` and `recent` keep some at both ends whatever their norms are.
    """

    name: ClassVar[str] = "knorm"
    source: ClassVar[str] = "L2 norm, Devoto et al., 2024, https://arxiv.org/abs/2406.11430"

    sinks: Annotated[int, Meta(ge=0, description="first tokens, always kept")] = 0
    recent: Annotated[int, Meta(ge=0, description="last tokens of the prompt, always kept")] = 0

    @property
    def protected(self) -> int:
        """Both ends."""
        return self.sinks + self.recent

    @property
    def reads(self) -> frozenset[Literal["keys", "values"]]:
        """Keys, to take their norms."""
        return frozenset({"keys"})

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Give a token the negative norm of its key; what is protected, infinity."""
        assert view.keys is not None, "a host gives the keys that `reads` asks for"
        return protect(-view.keys.norm(dim=-1), view, first=self.sinks, last=self.recent)
