"""A layer whose keys and values further layers of the model read, until the last has attended."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from kv_attention import Attended
from kv_policy import Observe, Queries


@dataclass(frozen=True, slots=True)
class SharedLayer:
    """What the layers that have attended observed, for the selector.

    Attributes:
        queries: those of the layer that stores the keys and values; its readers' are not kept.
        observed: per observation, the sums over all layers so far.
    """

    queries: Queries
    observed: Mapping[Observe, Attended]

    def with_reader(self, observed: Mapping[Observe, Attended]) -> "SharedLayer":
        """Add the observations of a further layer."""
        pairs = {what: _sum(self.observed[what], seen) for what, seen in observed.items()}
        return replace(self, observed=pairs)


def _sum(a: Attended, b: Attended) -> Attended:
    """Return the sums of two passes over the same tokens; the output is that of the second."""

    def added(x: tuple[Tensor, ...], y: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(left + right for left, right in zip(x, y, strict=True))

    also = tuple(
        {name: x[name] + y[name] for name in x} for x, y in zip(a.also, b.also, strict=True)
    )
    return Attended(b.out, added(a.mass, b.mass), added(a.seen, b.seen), also)
