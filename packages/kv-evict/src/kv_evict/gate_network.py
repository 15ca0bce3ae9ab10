"""The function of a gate: for every KV head a linear model and one hidden layer."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class GateNetwork:
    """Weights of every head: w · x + sum over units of outer · max(0, inner · x).

    The last feature of x is 1, so its weights are the constants. Without units it is linear.
    """

    linear: Float[Tensor, "*H F"]
    inner: Float[Tensor, "*H F U"]
    outer: Float[Tensor, "*H U"]

    def __call__(self, features: Float[Tensor, "*H L F"]) -> Float[Tensor, "*H L"]:
        """Return the logarithm of the score of each token."""
        # One product for both, as it is bound by reading the features.
        both = features @ torch.cat((self.inner, self.linear[..., None]), -1)
        found: Tensor = both[..., -1] + (both[..., :-1].relu() @ self.outer[..., None])[..., 0]
        return found

    def rows(self, layer: Int[Tensor, " B"], heads: slice) -> "GateNetwork":
        """Return the weights of some heads of layers, a row for each layer given."""
        return GateNetwork(*(x[:, heads][layer] for x in self._tensors))

    def to(self, device: torch.device) -> "GateNetwork":
        """Return the network on a device, in float32."""
        return GateNetwork(*(x.to(device, torch.float32) for x in self._tensors))

    def halves(self) -> "GateNetwork":
        """Return the network with the hidden layer rounded to float16, as a file holds it."""
        return GateNetwork(self.linear, self.inner.half(), self.outer.half())

    @property
    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear, self.inner, self.outer
