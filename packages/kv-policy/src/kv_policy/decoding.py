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
    except UnicodeError as error:
        raise ValueError(f"it is not UTF-8 text ({error})") from None
    except RecursionError:
        raise ValueError("its values are nested too deep") from None
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
