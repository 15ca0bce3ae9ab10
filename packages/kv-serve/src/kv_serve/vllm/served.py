"""Markers of the attention backends and implementations that support policies."""


class ServesPolicy:
    """Base of the backends with which kv-serve replaces vLLM's own."""


class UnderPolicy:
    """Base of the implementation of attention that stores keys and values as a policy says."""


class Kept:
    """Base of the implementation that is vLLM's own, beside layers under a policy.

    Attributes:
        drafts: whether its layer drafts for a model in pages.
    """

    drafts: bool = False
