"""What the doctor says of one thing that is wrong."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not as it could be, and what to do."""

    what: str
    remedy: str
    broken: bool = True  # installed and not working; False: a hint, everything is served
