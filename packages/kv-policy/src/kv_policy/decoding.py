"""JSON that a user or a stranger may have written, decoded into a type or refused."""

from typing import TypeVar

import msgspec

T = TypeVar("T")


def decode(data: bytes | str, form: type[T]) -> T:
    """Decode JSON into a type.

    Raises:
        ValueError: it is no UTF-8 text, no JSON, nested too deep or not of that form; the message
            is a clause that says which.
    """
    try:
        return msgspec.json.decode(data, type=form)
    except UnicodeError as error:
        raise ValueError(f"it is not UTF-8 text ({error})") from None
    except RecursionError:
        raise ValueError("its values are nested too deep") from None
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
