"""The policy of a text, looked up once."""

import functools

from kv_policy import KVPolicy, parse


@functools.cache
def policy_of(text: str) -> KVPolicy:
    """Parse a policy; what is installed is looked through the first time alone.

    Raises:
        ValueError: the text is not a policy's.
    """
    return parse(text)
