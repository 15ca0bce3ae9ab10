"""Fail a single request: its client receives an error, and all others continue.

vLLM's scheduler ends requests whose blocks a KV connector could not load, but it compares the
number of tokens computed before, so it would accept a token of a request that fails in its first
step. With our connector, the method that finds these requests calls the connector instead. vLLM
does the rest: it discards their tokens, finishes them with an error and frees their blocks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from kv_serve.vllm.extending import extend

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

    extend(Scheduler, "_handle_invalid_blocks", _found)


def _found(
    find: Callable[["Scheduler", set[int], dict[str, int]], set[str]],
    self: "Scheduler",
    invalid_block_ids: set[int],
    num_scheduled_tokens: dict[str, int],
) -> set[str]:
    if isinstance(self.connector, EndsRequests):
        return self.connector.failed(invalid_block_ids)
    return find(self, invalid_block_ids, num_scheduled_tokens)
