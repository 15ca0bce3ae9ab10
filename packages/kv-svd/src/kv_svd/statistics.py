"""Statistics of a model's heads: second moments of all their vectors, layer by layer."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from kv_svd.fit import Moments, of_queries, of_tokens, rotation


@dataclass(frozen=True)
class LayerStatistics:
    """Second moments of one layer: of stored vectors, and of those they are multiplied with."""

    query: Moments  # after RoPE, summed over a KV head's group: H of D
    key: Moments  # after RoPE, `together` heads concatenated
    value: Moments  # the same for values
    output: Moments  # of the output projection's slices, which multiply the values: H of Dv
    key_sum: Float64[Tensor, "H D"] | None = None  # of each head's keys; None: an older file

    @property
    def together(self) -> int:
        """KV heads concatenated in the moments of keys and values."""
        return len(self.query.total) // len(self.key.total)

    @property
    def keys(self) -> Moments:
        """Moments of each head's own keys."""
        return self.key.blocks(self.together)

    @property
    def values(self) -> Moments:
        """Moments of each head's own values."""
        return self.value.blocks(self.together)

    def seen(
        self,
        query: Float[Tensor, "B H G L D"],
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B H L Dv"],
        there: Bool[Tensor, "B L"] | None = None,
    ) -> "LayerStatistics":
        """Return these statistics with more tokens, after RoPE; `there` is False for padding.

        Raises:
            ValueError: the vectors contain an infinity or NaN, or have other heads or dimensions.
        """
        more = {
            "query": of_queries(query, there),
            "key": of_tokens(key, there, self.together),
            "value": of_tokens(value, there, self.together),
        }
        for name, moments in more.items():
            if not moments.total.isfinite().all():
                raise ValueError(
                    f"the {name} vectors contain an infinity or NaN; mask padding, and load the "
                    "model in a numerically stable dtype"
                )
            more[name] = Moments(moments.total.cpu(), moments.rows)
        wide = key.double()
        if there is not None:
            wide = wide.where(there[:, None, :, None], 0)
        return LayerStatistics(
            self.query + more["query"],
            self.key + more["key"],
            self.value + more["value"],
            self.output,
            None if self.key_sum is None else self.key_sum + wide.sum((0, 2)).cpu(),
        )


def nothing_seen(group: int, key_dim: int, output: Moments, together: int = 1) -> LayerStatistics:
    """Return the statistics of a layer before the first token.

    Args:
        group: query heads per KV head.
        key_dim: dimensions of a key.
        output: moments of the output projection's slices, one per KV head, from `of_output`.
        together: heads concatenated in the moments of keys and values.

    Raises:
        ValueError: `together` does not divide the heads, or a size is below 1.
    """
    heads, value_dim, _ = output.total.shape
    if min(group, key_dim) < 1:
        raise ValueError(f"group={group} and key_dim={key_dim} were given; both must be at least 1")
    if together < 1 or heads % together:
        raise ValueError(f"{heads} KV heads cannot be grouped by {together}; choose a divisor")

    def empty(count: int, dim: int) -> Moments:
        return Moments(torch.zeros(count, dim, dim, dtype=torch.float64), 0)

    joined = heads // together
    return LayerStatistics(
        empty(heads, key_dim),
        empty(joined, key_dim * together),
        empty(joined, value_dim * together),
        Moments(output.total.cpu(), output.rows),
        torch.zeros(heads, key_dim, dtype=torch.float64),
    )


@dataclass(frozen=True)
class Statistics:
    """The statistics of all layers, and the singular values that ZACK uses."""

    layers: tuple[LayerStatistics, ...]
    key: Float64[Tensor, "N H D"]  # singular values of queries and keys stacked
    value: Float64[Tensor, "N H Dv"]  # of values and the output projection stacked

    @classmethod
    def of(cls, layers: "tuple[LayerStatistics, ...]") -> "Statistics":
        """Compute the singular values; descending, by layer and KV head."""
        return cls(
            layers,
            torch.stack([rotation(layer.query + layer.keys).singular for layer in layers]),
            torch.stack([rotation(layer.values + layer.output).singular for layer in layers]),
        )

    @property
    def tokens(self) -> int:
        """Tokens accumulated."""
        return self.layers[0].key.rows

    @property
    def together(self) -> int:
        """KV heads concatenated in the moments of keys and values."""
        return self.layers[0].together

    def __iter__(self) -> Iterator[LayerStatistics]:
        """Iterate over the layers in order."""
        return iter(self.layers)
