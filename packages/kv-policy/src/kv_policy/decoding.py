"""Decoding and validation of untrusted JSON."""

from typing import TypeVar

import msgspec

T = TypeVar("T")


def decode(data: bytes | str, form: type[T]) -> T:
    """Decode JSON into a type.

    Raises:
        ValueError: the data is not UTF-8 text, not JSON, nested too deep or of another form; the
            message is a clause with the reason.
    """
    try:
        return msgspec.json.decode(data, type=form)
    except RecursionError:
        raise ValueError("its values are nested too deep") from None
    except (UnicodeError, msgspec.MsgspecError) as error:
        # msgspec before 0.23 raises UnicodeError for such text, and DecodeError since
        if (reason := _not_utf8(data)) is not None:
            raise ValueError(f"it is not UTF-8 text ({reason})") from None
        raise ValueError(str(error)) from None


def _not_utf8(data: bytes | str) -> str | None:
    """Return the reason that the data is not UTF-8 text, or None if it is."""
    try:
        data.encode() if isinstance(data, str) else data.decode()
    except UnicodeError as error:
        return str(error)
    return None
