"""A marker for attention backends that support policies."""


class ServesPolicy:
    """Base of the backends with which kv-serve replaces vLLM's own."""
