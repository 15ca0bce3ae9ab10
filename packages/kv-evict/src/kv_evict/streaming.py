"""StreamingLLM: attention sinks and the most recent tokens."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from jaxtyping import Float
from msgspec import Meta
from torch import Tensor

from kv_policy import Evictor, LayerView


@dataclass(frozen=True)
class Streaming(Evictor):
    """Keep the first `sinks` tokens and the most recent ones, `budget` in all, at every step.

    A token's score is its position, so when a token arrives and the budget is full, the oldest
    token that is not a sink is evicted, after a prompt and during generation. Nothing is observed.

    With `chunks` tokens are evicted after each prefill chunk of a prompt, too, so that a prompt
    never has to fit uncompressed. The same tokens stay, but those of later chunks attend to what is
    left of earlier ones. The budget is then a number of tokens.

    Tokens keep the positions that their keys were rotated to. The paper's code renumbers them
    inside the cache, so that it can exceed the length a model was trained for; here that length is
    the limit.
    """

    name: ClassVar[str] = "streaming"
    source: ClassVar[str] = "StreamingLLM, Xiao et al., 2023, https://arxiv.org/abs/2309.17453"
    decode = "step"  # each generated token evicts the oldest that is not a sink
    decodes_on_device = True

    sinks: Annotated[int, Meta(ge=0, description="first tokens of a sequence, always kept")] = 4
    chunks: Annotated[
        bool, Meta(description="plan after each prefill chunk, for prompts that do not fit whole")
    ] = False

    @property
    def plans_chunks(self) -> bool:
        """If `chunks` is set."""
        return self.chunks

    @property
    def protected(self) -> int:
        """The sinks and the newest token, whose score is the highest."""
        return super().protected + 1

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return the position of a token, and infinity for a sink."""
        return self.protect(view.position.to(view.score.dtype), view)
