"""Cached parsing of policies."""

import functools

from kv_policy import KVPolicy, parse


@functools.cache
def policy_of(text: str) -> KVPolicy:
    """Parse a policy, with a cache so that installed packages are scanned once per text.

    Raises:
        ValueError: the text is not a policy.
    """
    return parse(text)
