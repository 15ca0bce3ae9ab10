"""The settings of LeanKV that calibration tries (section 7.2 of the paper)."""

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
    """Give all settings, the cheapest pruning last, and none that contradicts itself.

    A token below the low threshold is below the high one too, so pairs of thresholds the other way
    round are left out; where nothing is stored in low precision, only the high one is tried.

    Raises:
        ValueError: a threshold that is no share of 1, or lists that leave nothing to try.
    """
    for name, shares in (("t_high", t_high), ("t_low", t_low)):
        for share in shares:
            if not 0 <= share <= 1:
                raise ValueError(
                    f"{name}={share} is no share of a head's attention; give 0 to 1, or 0% to 100%"
                )
    found = tuple(
        Setting(high, low, above, below, window, group, last)
        for high, low in dict.fromkeys(pairs)
        for below in (sorted(set(t_low)) if low != DROP else [0.0])
        for above in sorted(set(t_high))
        if below <= above
    )
    if not found:
        raise ValueError(
            "there is nothing to try: every t_low is above every t_high, or a list is empty"
        )
    return found


def _value(text: str) -> str:
    """A value in a text form, where commas and plus signs mean something else."""
    return text.replace(",", "\\,").replace("+", "\\+")
