"""What marks an attention backend that a policy can be served in."""


class ServesPolicy:
    """Base of the backends that kv-serve puts in the place of vLLM's own."""
