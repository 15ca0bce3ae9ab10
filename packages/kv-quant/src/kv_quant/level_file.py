"""The file of levels fitted to a model, as JSON."""

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from kv_policy import NotCalibratedError
from kv_policy.decoding import decode
from kv_policy.files import write_whole
from kv_policy.tensor_files import Stamp, stamp
from kv_quant.fitted import LevelsCodec

FORMAT: Final = "kv-quant levels 1"
CALIBRATION: Final = "levels"

Count = Annotated[int, Meta(ge=0)]


class Fit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Levels of keys and of values, for codes of some bits beside some outliers.

    They are in units of a vector's scale, from 0 to 2**bits - 1.
    """

    bits: Annotated[int, Meta(ge=1, le=4)]
    outliers: Count  # elements of a vector that are kept apart
    keys: tuple[float, ...]
    values: tuple[float, ...]


class FittedLevels(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Levels of codes fitted to a model, and what they were fitted to.

    `kv-serve calibrate levels` writes it, `k4v4:levels=fitted,file=FILE` reads it.
    """

    format: Literal["kv-quant levels 1"] = FORMAT
    model: str  # display name
    fingerprint: str  # of its weights, settings and tokenizer
    text: str  # name of the text
    digest: str  # of that text
    tokens: Count  # that were read
    fits: tuple[Fit, ...]

    def of(self, bits: int, outliers: int) -> Fit | None:
        """Return the levels for codes of some bits beside some outliers; None: there are none."""
        each = (fit for fit in self.fits if (fit.bits, fit.outliers) == (bits, outliers))
        return next(each, None)

    @property
    def outliers(self) -> tuple[int, ...]:
        """The numbers of outliers that levels were fitted for, ascending."""
        return tuple(sorted({fit.outliers for fit in self.fits}))


def save(path: Path, found: FittedLevels) -> None:
    """Write levels atomically.

    Raises:
        ValueError: a codec cannot have the levels.
        OSError: writing failed; an existing file is unchanged.
    """
    _check(found)
    write_whole(path, msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")


def load(policy: str, file: str) -> FittedLevels:
    """Load levels; cached until the file changes.

    Args:
        policy: the name of the policy that reads them, for the message.
        file: its path.

    Raises:
        NotCalibratedError: the file does not exist.
        ValueError: it is damaged or holds no levels.
    """
    path = Path(file)
    if path.suffix == ".partial":
        raise ValueError(
            f"{path} holds the state of an unfinished calibration; run the same `kv-serve "
            f"calibrate levels` again, which resumes from it, and use {path.with_suffix('')}"
        )
    try:
        return _load(stamp(path), file)
    except FileNotFoundError:
        raise NotCalibratedError(policy, file, CALIBRATION) from None


@lru_cache(maxsize=8)
def _load(found: Stamp, file: str) -> FittedLevels:
    try:
        data = found.path.read_bytes()
    except FileNotFoundError:
        raise
    except IsADirectoryError:
        raise ValueError(f"{file} is a directory; name a file of levels in it") from None
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{file[:200]} cannot be read: {reason}; name a file of levels") from None
    try:
        levels = decode(data, FittedLevels)
        _check(levels)
    except ValueError as error:
        raise ValueError(
            f"{file} holds no levels: {error}; use a file that `kv-serve calibrate levels` wrote"
        ) from None
    return levels


def _check(found: FittedLevels) -> None:
    """Raise unless a codec can have the levels of each fit, and no two are for the same codes.

    Raises:
        ValueError: the message is a clause with the reason.
    """
    seen: set[tuple[int, int]] = set()
    for fit in found.fits:
        if (fit.bits, fit.outliers) in seen:
            raise ValueError(
                f"levels for {fit.bits} bits beside {fit.outliers} outliers are given twice"
            )
        seen.add((fit.bits, fit.outliers))
        for levels in (fit.keys, fit.values):
            LevelsCodec(1, fit.bits, levels)
