"""The LeanKV settings that calibration tries (section 7.2 of the paper)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

T_HIGH: Final = (0.005, 0.01, 0.05, 0.1, 0.2)
T_LOW: Final = (0.0, 0.001, 0.005, 0.01)
PAIRS: Final = (("k8v4", "k4v2"), ("k4v2", "k4v1"), ("k8v8", "k8v4"), ("k8v4", "drop"))
DROP: Final = "drop"


@dataclass(frozen=True, slots=True)
class Setting:
    """Formats and thresholds of `leankv`."""

    high: str
    low: str
    t_high: float
    t_low: float
    window: int = 64
    group: Literal["max", "mean"] = "max"
    last: int | None = 64

    @property
    def spec(self) -> str:
        """The policy's text form."""
        last = "none" if self.last is None else self.last
        return (
            f"leankv:high={_value(self.high)},low={_value(self.low)},t_high={self.t_high},"
            f"t_low={self.t_low},window={self.window},group={self.group},last={last}"
        )


def grid(
    pairs: Sequence[tuple[str, str]] = PAIRS,
    t_high: Sequence[float] = T_HIGH,
    t_low: Sequence[float] = T_LOW,
    window: int = 64,
    group: Literal["max", "mean"] = "max",
    last: int | None = 64,
) -> tuple[Setting, ...]:
    """Return all valid combinations, with the most pruning last.

    A token below the low threshold is below the high one too, so pairs with a higher low threshold
    are omitted; without a low-precision format only the high threshold varies.

    Raises:
        ValueError: a threshold is not between 0 and 1, or no combination is left.
    """
    for name, shares in (("t_high", t_high), ("t_low", t_low)):
        for share in shares:
            if not 0 <= share <= 1:
                raise ValueError(
                    f"{name}={share} is not a share of a head's attention; use 0 to 1, or 0% to "
                    "100%"
                )
    found = tuple(
        Setting(high, low, above, below, window, group, last)
        for high, low in dict.fromkeys(pairs)
        for below in (sorted(set(t_low)) if low != DROP else [0.0])
        for above in sorted(set(t_high))
        if below <= above
    )
    if not found:
        raise ValueError("no setting to try: every t_low is above every t_high, or a list is empty")
    return found


def _value(text: str) -> str:
    """Escape a value for a text form, where commas and plus signs are separators."""
    return text.replace(",", "\\,").replace("+", "\\+")
