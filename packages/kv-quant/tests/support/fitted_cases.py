"""Files of fitted levels, which are no even steps."""

from pathlib import Path

from kv_quant.fitted import BITS
from kv_quant.level_file import Fit, FittedLevels, save


def levels_of(bits: int, bend: float) -> tuple[float, ...]:
    """Return levels in units of the scale, closer to each other at one end."""
    top = 2**bits - 1
    return tuple(0.125 + (top - 0.25) * (code / top) ** bend for code in range(top + 1))


def fitted(bend: float = 1.5) -> FittedLevels:
    """Return levels beside none and beside two outliers."""
    fits = []
    for outliers in (0, 2):
        for bits in BITS:
            keys, values = levels_of(bits, bend + outliers / 8), levels_of(bits, 1 / bend)
            fits.append(Fit(bits=bits, outliers=outliers, keys=keys, values=values))
    return FittedLevels(
        model="tiny",
        fingerprint="0123456789abcdef",
        text="sentences",
        digest="fedcba9876543210",
        tokens=4096,
        fits=tuple(fits),
    )


def written(folder: Path) -> str:
    """Write such a file, and return its path."""
    save(folder / "levels.json", fitted())
    return str(folder / "levels.json")
