"""How a layer turns logits into probabilities."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Softmax:
    """The options of a layer's softmax, as its model passes them to attention.

    Attributes:
        scale: the factor of the logits.
        softcap: the bound c of the scaled logits x, which become c * tanh(x / c) (Gemma 2); None:
            no bound.
        sinks: a logit of each query head that takes part in the softmax and has no value (gpt-oss);
            None: none.
    """

    scale: float
    softcap: float | None = None
    sinks: Float[Tensor, " Hq"] | None = None

    def sinks_by_head(self, kv_heads: int) -> Float[Tensor, "H G"] | None:
        """Return the sinks by KV head and index in the GQA group."""
        return None if self.sinks is None else self.sinks.unflatten(0, (kv_heads, -1))

    @property
    def is_plain(self) -> bool:
        """Whether the softmax has neither a bound nor sinks."""
        return self.softcap is None and self.sinks is None
