"""StreamingLLM: the first tokens, which attention rests on, and the most recent ones."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from jaxtyping import Float
from msgspec import Meta
from torch import Tensor

from kv_policy import Evictor, LayerView


@dataclass(frozen=True)
class Streaming(Evictor):
    """Keep the first `sinks` tokens and the most recent ones, `budget` in all, at every moment.

    A token's score is its position, so whenever one comes in and the budget is full, the oldest
    that is no sink leaves, while generating as after a prompt. Nothing is observed.

    Tokens keep the positions that their keys were rotated for. The paper's code instead numbers
    them anew inside the cache, so that it can run past the length a model was trained for; here
    that length stays the limit.
    """

    name: ClassVar[str] = "streaming"
    source: ClassVar[str] = "StreamingLLM, Xiao et al., 2023, https://arxiv.org/abs/2309.17453"
    decode = "step"  # each generated token takes the place of the oldest that is no sink

    sinks: Annotated[int, Meta(ge=0, description="first tokens of a sequence, always kept")] = 4

    @property
    def protected(self) -> int:
        """The sinks, and the newest token, whose position is the highest score."""
        return super().protected + 1

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Give a token its position, and a sink infinity."""
        return self.protect(view.position.to(view.score.dtype), view)
