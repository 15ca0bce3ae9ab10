"""Fitting the networks of a gate to examples, all heads of all layers at once."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from kv_evict.gate_features import features
from kv_evict.gate_network import GateNetwork
from kv_policy import CacheShape

STEPS: Final = 1500
BATCH: Final = 512  # tokens of every head per step
RATE: Final = 2e-3  # largest learning rate of Adam
_WARM: Final = 0.1  # share of the steps in which the rate rises; then it falls to zero
_FLAT: Final = 1e-3  # least standard deviation of a feature, over its root mean square
_BIAS: Final = -1  # the feature that is always 1


@dataclass(frozen=True)
class Examples:
    """Tokens of every head and the logarithms of their target scores."""

    key: Float[Tensor, "N H T D"]  # before RoPE
    value: Float[Tensor, "N H T Dv"]
    target: Float[Tensor, "N H T"]


@dataclass(frozen=True)
class Moments:
    """Mean and standard deviation of every head's features; of the last feature 0 and 1."""

    mean: Float[Tensor, "N H F"]
    deviation: Float[Tensor, "N H F"]

    @staticmethod
    def of(squares: Float[Tensor, "N H F F"], tokens: int) -> "Moments":
        """Return them from sums of the features' products over so many tokens."""
        mean = squares[..., _BIAS] / tokens
        square = squares.diagonal(dim1=-2, dim2=-1) / tokens
        spread = (square - mean.square()).clamp(min=0).sqrt()
        deviation = torch.maximum(spread, _FLAT * square.sqrt())
        deviation = deviation.masked_fill(square == 0, 1)
        mean[..., _BIAS], deviation[..., _BIAS] = 0, 1
        return Moments(mean.float(), deviation.float())


class NetworkFit:
    """Adam (Kingma and Ba, 2015, https://arxiv.org/abs/1412.6980) on the mean squared error.

    The network starts as a linear model beside random units of little weight; the learning rate
    rises and falls once (Smith and Topin, 2018, https://arxiv.org/abs/1708.07120). The result
    depends on nothing but the arguments: batches and first weights are drawn with a fixed seed.
    """

    def __init__(
        self,
        shape: CacheShape,
        linear: Float[Tensor, "N H F"],
        moments: Moments,
        units: int,
        device: torch.device,
    ) -> None:
        """Start from a linear model, with `units` units per head."""
        self.shape, self.moments, self.device = shape, moments, device
        self._chance = torch.Generator().manual_seed(0)
        heads, count = linear.shape[:2], linear.shape[2]

        def drawn(*sizes: int, scale: float) -> Tensor:
            found = torch.randn(*heads, *sizes, generator=self._chance, dtype=torch.float32) * scale
            return found.to(device).requires_grad_()

        self._linear = (linear * moments.deviation).to(device).requires_grad_()
        with torch.no_grad():  # of features less their mean
            self._linear[..., _BIAS] += (linear * moments.mean).sum(-1).to(device)
        self._inner = drawn(count, units, scale=1.5 * count**-0.5)
        self._outer = drawn(units, scale=0.05)

    def run(self, examples: Examples) -> Iterator[float]:
        """Fit to the examples; yield the share that is done after each step."""
        weights = [self._linear, self._inner, self._outer]
        mean, deviation = (
            x[:, :, None].to(self.device) for x in (self.moments.mean, self.moments.deviation)
        )
        optimizer = torch.optim.Adam(weights, lr=RATE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, RATE, total_steps=STEPS, pct_start=_WARM
        )
        for step in range(STEPS):
            chosen = torch.randint(examples.key.shape[2], (BATCH,), generator=self._chance)
            given, wanted = self._batch(examples, chosen)
            with torch.enable_grad():
                found = GateNetwork(*weights)((given - mean) / deviation)
                # Every head is a fit of its own: the sum over heads of each one's mean.
                loss = (found - wanted).square().mean(-1).sum()
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            schedule.step()
            yield (step + 1) / STEPS

    def network(self) -> GateNetwork:
        """Return the network of features as they are, on the CPU, as a file holds it."""
        mean, deviation = self.moments.mean, self.moments.deviation
        linear, inner, outer = (x.detach().cpu() for x in (self._linear, self._inner, self._outer))
        linear, inner = linear / deviation, inner / deviation[..., None]
        linear[..., _BIAS] -= (linear * mean).sum(-1)
        inner[..., _BIAS, :] -= (inner * mean[..., None]).sum(-2)
        return GateNetwork(linear, inner, outer).halves()

    def _batch(
        self, examples: Examples, chosen: Tensor
    ) -> tuple[Float[Tensor, "N H T F"], Float[Tensor, "N H T"]]:
        key, value, target = (
            x[:, :, chosen].to(self.device).float()
            for x in (examples.key, examples.value, examples.target)
        )
        layers = torch.arange(self.shape.layers, device=self.device)
        pairs = self.shape.pair_norms(key, layers)
        return features(key, pairs, value), target
