"""The function of a gate: for every KV head a linear model and one hidden layer."""

from collections.abc import Sequence
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
        return self.of((features.mT,))

    def of(self, parts: Sequence[Float[Tensor, "*H _ L"]]) -> Float[Tensor, "*H L"]:
        """Return the same for features in parts, token by column, which are not copied together."""
        lead = self.linear.shape[:-1]
        # Products with tokens by column are fast for few units; one reads each part for both.
        weight = torch.cat((self.inner, self.linear[..., None]), -1).mT.flatten(0, -3)
        flat = [part.flatten(0, -3) for part in parts]
        each = weight.split([part.shape[1] for part in flat], -1)
        total = torch.bmm(each[0], flat[0])
        for some, part in zip(each[1:], flat[1:], strict=True):
            total.baddbmm_(some, part)
        hidden = total[:, :-1].relu() * self.outer.reshape(len(total), -1, 1)
        return (hidden.sum(1) + total[:, -1]).view(*lead, -1)

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
