"""The scheduler's side: requests, their budgets, and what workers told of their pages."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kv_policy import Budget, KVPolicy
from kv_serve.vllm.config import UnservableError
from kv_serve.vllm.messages import Orders, Reports, Turn
from kv_serve.vllm.requests import requested_budget
from kv_serve.vllm.spec import PagedManager

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kv_serve")


@dataclass(slots=True)
class Ledger:
    """Requests as the scheduler knows them."""

    policy: KVPolicy
    manager: PagedManager
    requests: dict[str, "Request"] = field(default_factory=dict)
    budgets: dict[str, Budget] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)  # tokens to read before one is generated
    known: dict[str, int] = field(default_factory=dict)  # whom workers hold, since which step
    step: int = 0  # the last one's number
    asked: bool = False  # the next step says that blocks are short
    answered: bool = False  # workers compressed what they could, and blocks are short still

    @classmethod
    def over(cls, policy: KVPolicy, managers: "KVCacheManager", longest: int) -> "Ledger":
        """Find our manager among vLLM's.

        Raises:
            UnservableError: it has no room for a prompt of `longest` tokens.
        """
        (manager,) = managers.coordinator.single_type_managers
        assert isinstance(manager, PagedManager)
        manager.expect_room(longest)
        return cls(policy, manager)

    def welcome(self, request: "Request") -> None:
        """Read the budget of a request; vLLM's HTTP server under `kv-serve serve` refuses bad ones.

        Where nobody did, it is too late to refuse: the request is served by the policy's own.
        """
        self.requests[request.request_id] = request
        params = request.sampling_params
        extra = None if params is None else params.extra_args
        try:
            budget = requested_budget(self.policy, extra)
        except ValueError as error:
            own = "the request %s is served by the policy's own budget: %s"
            logger.warning(own, request.request_id, error)
            budget = None
        if budget is not None:
            self.budgets[request.request_id] = budget

    def finished(self, request: str) -> None:
        """Forget a request; workers hear of it with the next step."""
        self.requests.pop(request, None)
        self.budgets.pop(request, None)
        self.prompts.pop(request, None)

    def ask(self) -> bool:
        """Ask workers to compress before anything is preempted; False if they just did.

        KV-Compress, section 4.2.3: compress again when memory is short.
        """
        selector = self.policy.selector
        if selector is None or not selector.replan.short or self.answered:
            return False
        self.asked = True
        return True

    def orders(self, step: "SchedulerOutput") -> Orders:
        """Say what a step is about.

        Raises:
            UnservableError: a request has more to read after its answer.
        """
        self.step += 1
        turns = {}
        begun = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        begun |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request, tokens in step.num_scheduled_tokens.items():
            first = self.manager.first_block(request)
            assert first is not None, "what is scheduled owns a block"
            turns[first] = self._turn(request, begun[request], tokens)
        gone = tuple(name for name in self.known if self.manager.first_block(name) is None)
        for request in gone:
            del self.known[request]
        self.answered = self.answered and not gone
        short, self.asked = self.asked, False
        return Orders(self.step, turns, gone, short)

    def note(self, reports: Reports) -> None:
        """Take note of pages; blocks that are not needed go back to vLLM's pool."""
        freed = 0
        for request, told in reports.told.items():
            if self.known.get(request, reports.step + 1) <= reports.step:  # has not begun anew
                freed += self.manager.told(request, told.pages, told.computed)
        self.answered = (self.answered or reports.answered) and not freed

    def _turn(self, request: str, computed: int, tokens: int) -> Turn:
        if computed == 0:  # after a preemption what was generated is read again, too
            self.prompts[request] = self.requests[request].num_tokens
            self.known[request] = self.step
        elif tokens > 1 and computed >= self.prompts[request]:
            raise UnservableError(
                f"the request {request} goes on with {tokens} new tokens after its answer; a "
                "kv_policy serves no sessions whose input comes in pieces: send a new request"
            )
        return Turn(request, computed, tokens, self.prompts[request], self.budgets.get(request))
