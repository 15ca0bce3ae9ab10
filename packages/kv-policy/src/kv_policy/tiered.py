"""Formats of several tiers, combined from formats loaded by name."""

from dataclasses import dataclass

from kv_policy.codec import TokenFormat
from kv_policy.contract import Formats
from kv_policy.shape import CacheShape
from kv_policy.spec import parse


@dataclass(frozen=True, slots=True)
class TieredFormats:
    """One format per tier, best first, after one shared raw window."""

    each: tuple[Formats, ...]
    window: int = 0

    def __post_init__(self) -> None:
        """Check that every format has a single tier and no window of its own.

        Raises:
            ValueError: no format, a format with several tiers, or one with a window of its own.
        """
        if not self.each:
            raise ValueError("no format is given; name at least one, such as k8v4")
        for formats in self.each:
            if formats.tiers != 1:
                raise ValueError(f"{formats} has {formats.tiers} tiers; use a format of one tier")
            if formats.window:
                raise ValueError(
                    f"{formats} keeps a window of {formats.window} raw tokens of its own; remove "
                    "it, because all tiers share one window"
                )

    @property
    def tiers(self) -> int:
        """K, the number of formats."""
        return len(self.each)

    def bind(self, shape: CacheShape) -> tuple[TokenFormat, ...]:
        """Return the format of each tier for heads of this shape."""
        return tuple(formats.bind(shape)[0] for formats in self.each)


def read_formats(text: str) -> Formats:
    """Load a format by its text form, such as `k8v4` or `k4v4:keys=channel`.

    Raises:
        UnknownPolicyError: the name is not installed.
        ValueError: the text is malformed, the policy is not just a format, or the format is fitted
            to a model, which a host does not compare for the formats of tiers.
    """
    policy = parse(text)
    if policy.formats is None or policy.selector is not None or policy.basis is not None:
        raise ValueError(f"{text} is not a format of a tier; name one such as k8v4, k4v2 or raw")
    if policy.fitted_to is not None:
        raise ValueError(
            f"{text} is fitted to a model, and formats of tiers are for any; use levels of no file"
        )
    return policy.formats
