"""What a request asks for beside what vLLM knows."""

from collections.abc import Mapping

from kv_policy import Budget, KVPolicy


def requested_budget(policy: KVPolicy, extra_args: Mapping[str, object] | None) -> Budget | None:
    """Read it."""
    return None
