"""Collection of a model's statistics on a calibration text, for `kv-serve calibrate zack`."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kv_policy import CacheShape, Calibrated
from kv_svd.file import Facts, save
from kv_svd.fit import Moments, of_output, ranks
from kv_svd.rates import MULTIPLE, levels
from kv_svd.statistics import LayerStatistics, Statistics, nothing_seen


class Calibration:
    """Accumulates second moments in float64; its memory does not grow with the tokens."""

    def __init__(
        self,
        shape: CacheShape,
        output: Iterable[Float[Tensor, "hidden QD"]],
        together: int = 1,
    ) -> None:
        """Start with only the moments of the output projections.

        Args:
            shape: the model's cache.
            output: weights of the output projections, layer by layer.
            together: KV heads whose vectors are concatenated, for `palu`.

        Raises:
            ValueError: the number of projections differs from the layers, a projection does not
                fit the heads or is not finite, or `together` does not divide the heads.
        """
        self.shape, self.together = shape, together
        self._found: Statistics | None = None  # cached statistics of the tokens so far
        self._layers = [
            nothing_seen(
                shape.group,
                shape.key_dim,
                of_output(weight, shape.kv_heads, shape.value_dim),
                together,
            )
            for weight in output
        ]
        if len(self._layers) != shape.layers:
            raise ValueError(
                f"{len(self._layers)} output projections were given for {shape.layers} layers; "
                "pass one per layer"
            )
        for i, layer in enumerate(self._layers):
            if not layer.output.total.isfinite().all():
                raise ValueError(f"the output projection of layer {i} contains an infinity or NaN")

    @property
    def tokens(self) -> int:
        """Tokens accumulated in every layer."""
        return min(layer.key.rows for layer in self._layers)

    def see(
        self,
        layer: int,
        query: Float[Tensor, "B H G L D"],
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B H L Dv"],
        there: Bool[Tensor, "B L"] | None = None,
    ) -> None:
        """Accumulate a layer's vectors, after RoPE; `there` is False for padding.

        Raises:
            ValueError: the vectors contain an infinity or NaN, or have other heads or dimensions.
        """
        self._found = None
        try:
            self._layers[layer] = self._layers[layer].seen(query, key, value, there)
        except ValueError as error:
            raise ValueError(f"layer {layer}: {error}") from None

    def state(self) -> dict[str, Tensor]:
        """Return the accumulated moments, stacked over layers, and the token counts."""
        found = {
            name: torch.stack([getattr(layer, name).total for layer in self._layers])
            for name in ("query", "key", "value")
        }
        sums = [layer.key_sum for layer in self._layers if layer.key_sum is not None]
        found |= {"key.sum": torch.stack(sums)}
        return found | {"tokens": torch.tensor([layer.key.rows for layer in self._layers])}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Resume from a state; the results are bitwise those of an uninterrupted run.

        Raises:
            ValueError: the state belongs to another model.
        """
        mine = {name: tensor.shape for name, tensor in self.state().items()}
        if {name: tensor.shape for name, tensor in state.items()} != mine:
            raise ValueError("the state is of a model with other sizes; start over")
        group, self._found = self.shape.group, None
        self._layers = [
            LayerStatistics(
                Moments(query, count * group),
                Moments(key, count),
                Moments(value, count),
                layer.output,
                sums,
            )
            for layer, query, key, value, sums, count in zip(
                self._layers,
                state["query"],
                state["key"],
                state["value"],
                state["key.sum"],
                state["tokens"].tolist(),
                strict=True,
            )
        ]

    def statistics(self) -> Statistics:
        """Return the accumulated statistics with their singular values.

        Raises:
            ValueError: no tokens were accumulated, or some layers have more than others.
        """
        counts = {layer.key.rows for layer in self._layers}
        if len(counts) > 1:
            raise ValueError(
                f"layers have seen from {min(counts)} to {max(counts)} tokens; feed all layers "
                "the same tokens first"
            )
        if self._found is None:
            self._found = Statistics.of(tuple(self._layers))
        return self._found

    def dimensions(self, removal: float) -> dict[str, float]:
        """Return the median dimensions per head at a removal rate (Eq. 6)."""
        found = self.statistics()
        both = {"Q-K": found.key, "V-O": found.value}
        return {
            name: float(ranks(singular, removal).double().quantile(0.5))
            for name, singular in both.items()
        }

    def rates(self, count: int) -> tuple[float, ...]:
        """Return the shares of the cache that `zack` can remove, ascending; at most `count`."""
        found = self.statistics()
        return levels(found.key, found.value, count, MULTIPLE)

    def write(self, path: Path, facts: Calibrated) -> None:
        """Write the statistics atomically.

        Raises:
            ValueError: no tokens were accumulated.
        """
        found, shape = self.statistics(), self.shape
        head = Facts(
            model=facts.model,
            fingerprint=facts.fingerprint,
            text=facts.text,
            digest=facts.digest,
            tokens=found.tokens,
            layers=shape.layers,
            heads=shape.kv_heads,
            group=shape.group,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            output_rows=found.layers[0].output.rows,
            together=self.together,
            rate=facts.rate,
            max_loss=facts.max_loss,
            tasks=facts.tasks,
        )
        save(path, head, found)
