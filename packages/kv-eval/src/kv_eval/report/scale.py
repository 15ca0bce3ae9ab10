"""Axes: positions of values, and ticks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MINUS: Final = "\N{MINUS SIGN}"  # as wide as a plus


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear axis.

    Attributes:
    label: the quantity, and which direction is better.
    ticks: values in ascending order, at least two; the first and the last are its ends.
    decimals: of the ticks' numbers.
    unit: written after them.
    """

    label: str
    ticks: tuple[float, ...]
    decimals: int = 0
    unit: str = ""

    def place(self, value: float, start: float, end: float) -> float:
        """Return the position of a value if the axis spans `start` to `end`."""
        low, high = self.ticks[0], self.ticks[-1]
        return start + (end - start) * (value - low) / (high - low)

    def number(self, tick: float) -> str:
        """Format a tick's number."""
        return f"{tick:,.{self.decimals}f}{self.unit}".replace("-", MINUS)


def axis(label: str, values: Sequence[float], *, unit: str = "", count: int = 5) -> Axis:
    """Create an axis of about `count` round steps that covers all values.

    Raises:
        ValueError: no values, or one is not finite.
    """
    low, high = min(values), max(values)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"an axis cannot span {low} to {high}")
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-3):
        low, high = low - 0.05 * max(abs(low), 1e-3), high + 0.05 * max(abs(high), 1e-3)
    step = _round_step((high - low) / count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    ticks = tuple(round(i * step, decimals + 2) + 0.0 for i in range(first, last + 1))
    return Axis(label, ticks, decimals, unit)


def _round_step(raw: float) -> float:
    """Return the least of 1, 2, 5 times a power of ten that is not below."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
