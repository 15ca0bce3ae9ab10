"""Letting one request fail: its client is told of an error, and all others go on.

vLLM's scheduler ends requests whose blocks a KV connector could not load, but goes by how many
tokens were computed before, so it would take a token of a request that fails in its first step.
Where the connector is ours, the method that finds these requests asks it instead. The rest is
vLLM's own: no token is taken of them, they finish as an error, and their blocks are free.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


class EndsRequests(ABC):
    """A connector that says which requests fail."""

    @abstractmethod
    def failed(self, told: Collection[int]) -> set[str]:
        """Name the requests that fail, by what the workers told of them."""


def watch() -> None:
    """Let vLLM's scheduler ask a connector of ours which requests fail; any number of times."""
    from vllm.v1.core.sched.scheduler import Scheduler

    find = Scheduler._handle_invalid_blocks
    if find.__module__ == __name__:
        return

    @functools.wraps(find, assigned=("__name__", "__qualname__", "__doc__"))
    def found(
        self: "Scheduler", invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]
    ) -> set[str]:
        if isinstance(self.connector, EndsRequests):
            return self.connector.failed(invalid_block_ids)
        others: set[str] = find(self, invalid_block_ids, num_scheduled_tokens)
        return others

    Scheduler._handle_invalid_blocks = found
