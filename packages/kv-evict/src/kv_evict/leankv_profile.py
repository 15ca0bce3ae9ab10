"""LeanKV calibration results for a model: formats and thresholds, as a JSON file."""

from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from kv_policy import NotCalibratedError
from kv_policy.decoding import decode
from kv_policy.files import write_whole

FORMAT: Final = "leankv profile 1"

Share = Annotated[float, Meta(ge=0, le=1)]


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `leankv` for one model, and their measured cost.

    `kv-serve calibrate leankv` writes it, `leankv:profile=FILE` reads it.
    """

    format: Literal["leankv profile 1"] = FORMAT
    model: str  # display name
    fingerprint: str  # of its weights, settings and tokenizer
    high: str
    low: str
    t_high: Share
    t_low: Share
    window: Annotated[int, Meta(ge=0)] = 64
    group: Literal["max", "mean"] = "max"
    last: Annotated[int, Meta(ge=1)] | None = None
    max_loss: Share  # the allowed loss
    tasks: tuple[str, ...]  # the tasks the loss was measured on
    length: int  # tokens per prompt
    bytes_ratio: float  # cache bytes after the prompts over those of a full cache

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        write_whole(path, msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


def load_profile(path: Path) -> Profile:
    """Load a profile.

    Raises:
        ValueError: the file does not exist or is not a profile; the message gives the reason.
    """
    if path.suffix == ".partial":
        raise ValueError(
            f"{path} holds the samples of a calibration that has not finished; run the same "
            "`kv-serve calibrate leankv` again, which resumes from them, and use "
            f"{path.with_suffix('')}"
        )
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise NotCalibratedError("leankv", str(path), "leankv") from None
    except IsADirectoryError:
        raise ValueError(f"the profile {path} is a directory; name a file in it") from None
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"the profile {str(path)[:200]} cannot be read: {reason}") from None
    try:
        return decode(data, Profile)
    except ValueError as error:
        raise ValueError(
            f"{path} is not a leankv profile: {error}; use a file that `kv-serve calibrate "
            "leankv` wrote"
        ) from None
