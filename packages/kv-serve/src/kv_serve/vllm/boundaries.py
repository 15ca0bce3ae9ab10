"""Let a step end where the tokens of a request are compressed by themselves.

vLLM's scheduler ends a chunk of a prompt early for some layers and drafts, and a method decides it
for the latter. With our connector, that method also asks the connector.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from kv_serve.vllm.extending import extend

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


class StopsRequests(ABC):
    """A connector whose requests have boundaries."""

    @abstractmethod
    def stop(self, request: "Request", computed: int, tokens: int) -> int:
        """Return how many of a request's next `tokens` tokens its step has.

        Args:
            request: the request.
            computed: its tokens before the step.
            tokens: those that vLLM would schedule.
        """


def watch() -> None:
    """Make vLLM's scheduler ask our connector for boundaries; may be called repeatedly."""
    from vllm.v1.core.sched.scheduler import Scheduler

    extend(Scheduler, "_reserve_prefill_lookahead", _reserved)


def _reserved(
    reserve: Callable[["Scheduler", "Request", int, int], int],
    self: "Scheduler",
    request: "Request",
    num_computed_tokens: int,
    num_new_tokens: int,
) -> int:
    tokens = reserve(self, request, num_computed_tokens, num_new_tokens)
    if isinstance(self.connector, StopsRequests):
        return self.connector.stop(request, num_computed_tokens, tokens)
    return tokens
