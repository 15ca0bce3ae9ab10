"""A problem reported by `kv-serve doctor`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem and its remedy."""

    what: str
    remedy: str
    broken: bool = True  # installed but not working; False: a hint, everything works
