"""Fail a single request: its client receives an error, and all others continue.

vLLM's scheduler ends requests whose blocks a KV connector could not load, but it compares the
number of tokens computed before, so it would accept a token of a request that fails in its first
step. With our connector, the method that finds these requests calls the connector instead. vLLM
does the rest: it discards their tokens, finishes them with an error and frees their blocks.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


class EndsRequests(ABC):
    """A connector that reports failed requests."""

    @abstractmethod
    def failed(self, told: Collection[int]) -> set[str]:
        """Return the names of failed requests, from the numbers reported by workers."""


def watch() -> None:
    """Make vLLM's scheduler query our connector for failed requests; may be called repeatedly."""
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
