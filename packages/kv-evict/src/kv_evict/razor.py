"""RazorAttention: heads that look up repeated tokens keep every token."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from jaxtyping import Int
from msgspec import Meta
from torch import Tensor

from kv_evict.head_roles import HeadRoles
from kv_evict.heads_file import Kind
from kv_evict.layer_budgets import share_of


@dataclass(frozen=True)
class Razor(HeadRoles):
    """Keep every token in induction and echo heads; sinks and the newest tokens in the others.

    On random tokens that repeat, an induction head attends to the token after an earlier occurrence
    of its own, and an echo head to that occurrence. A KV head has the score of the best of its
    query heads. The `share` of all heads of the model with the highest induction scores, and the
    share `echo` with the highest echo scores, keep every token.

    The others keep the first `sinks` tokens and the newest: `recent` tokens, or the share `part` of
    the sequence, whichever is more. The shares, the sinks and `part` are the paper's, from memory;
    at least 4,000 newest tokens are kept there. A token that stands for the evicted ones, their
    mean, is left out: a policy selects tokens and cannot make one.
    """

    name: ClassVar[str] = "razor"
    source: ClassVar[str] = "RazorAttention, Tang et al., 2024, https://arxiv.org/abs/2407.15891"

    share: Annotated[
        float, Meta(ge=0, le=1, description="share of heads that keep all, by induction score")
    ] = 0.14
    echo: Annotated[
        float, Meta(ge=0, le=1, description="share of heads that keep all, by echo score")
    ] = 0.01
    sinks: Annotated[int, Meta(ge=0, description="first tokens of a sequence, always kept")] = 4
    recent: Annotated[int, Meta(ge=1, description="newest tokens, always kept, at least")] = 256
    part: Annotated[
        float, Meta(ge=0, le=1, description="newest tokens, as a share of the sequence")
    ] = 0.2

    @property
    def shares(self) -> tuple[tuple[Kind, float], ...]:
        """The two kinds of heads."""
        return (("induction", self.share), ("echo", self.echo))

    @property
    def protected(self) -> int:
        """The sinks and the newest tokens."""
        return self.sinks + self.recent

    def newest(self, length: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
        """Return `recent`, or the share `part` of the sequence if that is more."""
        return share_of(length, self.part).clamp(min=self.recent)
