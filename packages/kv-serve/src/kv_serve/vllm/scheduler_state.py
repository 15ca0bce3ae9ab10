"""The scheduler's side: requests, their budgets and their reported pages."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from kv_policy import Budget, KVPolicy, complete
from kv_runtime import Measured, RequestStep, appends_only, budget_tokens, chunk_budget, kept_tokens
from kv_serve.vllm.config import UnservableError
from kv_serve.vllm.documents import LoadedDocument
from kv_serve.vllm.messages import BlockCopies, StepMetadata, WorkerReport
from kv_serve.vllm.names import PREFIX, TURNS
from kv_serve.vllm.other_layers import OtherLayers
from kv_serve.vllm.prefixes import Prefixes, has_other_inputs
from kv_serve.vllm.requests import TOKENS_ALONE, requested_budget, requested_prefix
from kv_serve.vllm.spec import PagedManager

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kv_serve")
_WHOLE: Final = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass(slots=True)
class SchedulerState:
    """The scheduler's state of requests."""

    policy: KVPolicy
    manager: PagedManager
    longest: int  # max_model_len
    others: int = 0  # blocks of the longest request in layers that vLLM keeps
    drafts: int = 0  # the most drafts of a request in a step
    requests: dict[str, "Request"] = field(default_factory=dict)
    budgets: dict[str, Budget] = field(default_factory=dict)
    known: dict[str, int] = field(
        default_factory=dict
    )  # step in which each request in the workers began
    serials: dict[str, int] = field(default_factory=dict)  # of those, counted per start
    refused: dict[str, str] = field(default_factory=dict)  # why requests cannot be served
    begun: int = 0  # number of request starts
    step: int = 0  # number of the last step
    asked: bool = False  # the next step reports that blocks are short
    awaited: int | None = None  # the step that did so, until workers report on it
    answered: bool = False  # workers have compressed, but blocks are still short

    @classmethod
    def over(
        cls,
        policy: KVPolicy,
        managers: "KVCacheManager",
        longest: int,
        others: int = 0,
        *,
        stores: bool = False,
        turns: bool = False,
        workers: int = 1,
        loaded: Iterable[LoadedDocument] = (),
        drafts: int = 0,
    ) -> "SchedulerState":
        """Create the state with our manager, taken from vLLM's.

        Args:
            policy: the policy.
            managers: vLLM's managers, one for each group of layers.
            longest: tokens of the longest request.
            others: blocks that the longest request needs in layers that vLLM keeps.
            stores: whether prefixes are stored.
            turns: whether the states of finished requests are, too.
            workers: those that divide the heads.
            loaded: documents that workers have loaded.
            drafts: the most drafts of a request in a step.

        Raises:
            UnservableError: the pool is too small for a prompt of `longest` tokens, or prefixes
                would be found in other layers alone, or cannot be stored beside them.
        """
        every = managers.coordinator.single_type_managers
        manager, *followers = [each for each in every if isinstance(each, PagedManager)]
        kept = len(followers) + 1 < len(every)
        assert kept == manager.kv_cache_spec.kept, "blocks are sized for all layers"
        if kept and managers.enable_caching:
            raise UnservableError(
                "prefix caching is enabled, but prefixes would be found in layers that vLLM keeps "
                "and not in pages; set enable_prefix_caching to false"
            )
        manager.lead(followers)
        manager.ahead += drafts
        if stores:
            beside = OtherLayers.among(managers, PagedManager, workers)
            stranger = None if beside is None else beside.stranger
            if stranger is not None and turns:
                raise UnservableError(
                    f"{TURNS} is given, but a layer of this model has a {stranger}, and prefixes "
                    "are stored beside windows, chunks and states alone; omit the setting"
                )
            alike = appends_only(policy, planned=False)
            if stranger is None:
                manager.store_prefixes(turns=turns, appends_only=alike, others=beside)
        for document in loaded:
            manager.load(document)
        manager.expect_room(longest, chunk_budget(policy), others)
        book = cls(policy, manager, longest, others, drafts)
        book._warn_if_idle(longest)
        return book

    def _warn_if_idle(self, longest: int) -> None:
        """Warn that a policy never evicts, if the longest request is within its budget."""
        selector, size = self.policy.selector, self.manager.account.token_bytes
        if selector is None or complete(selector).budget is None:
            return
        if kept_tokens(self.policy, longest, size) >= longest:
            logger.warning(
                "%s keeps every token of a request of max_model_len, %d tokens, so it evicts none "
                "unless a request sets a smaller kv_budget; raise max_model_len, or give the "
                "policy a smaller budget",
                self.policy,
                longest,
            )

    def welcome(self, request: "Request") -> None:
        """Read the budget of a request; `admission` normally rejects bad ones earlier.

        If a bad budget arrives here, the request fails in its first step.
        """
        name, params = request.request_id, request.sampling_params
        self.requests[name], kept = request, chunk_budget(self.policy)
        given = None if params is None else params.extra_args
        try:
            budget, boundary = requested_budget(self.policy, given), requested_prefix(given)
            if budget is not None:
                own = chunk_budget(self.policy, budget)
                if own is not None:  # it may keep too much for this engine, and wait forever
                    most = request.num_tokens + request.max_tokens
                    self.manager.expect_room(min(most, self.longest), own, self.others)
                self.budgets[name], kept = budget, own
            if boundary is not None:
                self._prefixes_for(request).welcome(request, boundary, self._budget_of(name))
        except ValueError as error:
            self._refuse(name, str(error))
        self.manager.kept[name] = kept

    def _prefixes_for(self, request: "Request") -> Prefixes:
        """Return the stored prefixes, for a request that names a boundary.

        Raises:
            ValueError: this engine stores none, or tokens do not tell all of the request's input.
        """
        if self.manager.prefixes is None:
            raise ValueError(
                f"{PREFIX} needs prefixes that are stored, and this engine stores none: prefix "
                "caching is disabled, or its model has layers other than full attention, windows, "
                "chunks and states; omit it"
            )
        if has_other_inputs(request):
            raise ValueError(f"{PREFIX} {TOKENS_ALONE}")
        return self.manager.prefixes

    def _budget_of(self, request: str) -> str:
        budget = self.budgets.get(request)
        return "" if budget is None else str(budget)

    def match(self, request: "Request") -> int | None:
        """Return the tokens of a stored prefix that a waiting request continues; None: it waits."""
        prefixes, name = self.manager.prefixes, request.request_id
        if prefixes is None or name in self.refused or has_other_inputs(request):
            return 0
        found = prefixes.match(request, self._budget_of(name))
        base = prefixes.bases.get(name)
        if base is None or base.pinned or prefixes.size(base) <= self._room(request, base.tokens):
            return found
        del prefixes.bases[name]
        return 0

    def _room(self, request: "Request", base: int) -> int:
        """Return the most blocks of a prefix beside a request that continues it.

        With more, vLLM could never schedule the request. One that it has preempted gets room for
        all that it may generate, so that this does not happen to it again and again.
        """
        later = request.max_tokens if request.num_preemptions else 0
        tokens = min(request.num_tokens + later, self.longest)
        return self.manager.room(request.request_id, tokens, base) - self.others

    def stop(self, request: str, computed: int, tokens: int) -> int:
        """Return how many tokens of a request's next `tokens` are before its boundary.

        Tokens past the request's are drafts with which vLLM pads a step, and do not count.
        """
        prefixes = self.manager.prefixes
        boundary = None if prefixes is None else prefixes.boundaries.get(request)
        if boundary is None:
            return tokens
        end = min(computed + tokens, self.requests[request].num_tokens)
        if not computed < boundary < end:
            return tokens
        return boundary - computed

    def keep(self, request: "Request") -> None:
        """Store the state of a finished request for the next turn of its chat."""
        prefixes, name = self.manager.prefixes, request.request_id
        if prefixes is None or not prefixes.turns or request.status not in _WHOLE:
            return
        if name not in self.known or self.manager.first_block(name) is None:
            return
        if name not in self.refused and not has_other_inputs(request):
            tokens = request.num_computed_tokens
            if self.drafts:  # drafts that were right may follow the token that ended the request
                tokens = min(tokens, request.num_tokens - 1)
            self.manager.keep(request, tokens, self._budget_of(name), self.step + 1)

    def finished(self, request: str) -> None:
        """Remove a request; workers are informed with the next step."""
        if self.manager.prefixes is not None:
            self.manager.prefixes.finished(request)
        given: tuple[dict[str, Any], ...] = (self.requests, self.budgets, self.refused)
        for each in (*given, self.manager.kept, self.manager.prompts):
            each.pop(request, None)

    def failed(self, serials: Collection[int]) -> set[str]:
        """Return the requests with these serials, which failed in workers."""
        return {name for name, serial in self.serials.items() if serial in serials}

    def ask(self) -> bool:
        """Request blocks before vLLM preempts; False if there are no more to be had.

        First those that no request owns, then those of stored prefixes, then by compression, unless
        the workers have just compressed; nothing more is requested before they report. KV-Compress,
        section 4.2.3: compress again when memory is short.
        """
        if self._reclaim():
            return True
        selector = self.policy.selector
        if selector is None or not complete(selector).replan.short or self.answered:
            return False
        self.asked = self.awaited is None
        return True

    def _reclaim(self, blocks: int = 1) -> bool:
        """Ask for all blocks that no request owns, or for `blocks` or more of stored prefixes."""
        source, prefixes = self.manager.source, self.manager.prefixes
        if source.reclaim():
            return True
        given = prefixes is not None and prefixes.give_up(blocks)
        return source.reclaim() or given

    def metadata(self, step: "SchedulerOutput") -> StepMetadata:
        """Return the metadata of a step."""
        self.step += 1
        requests = {}
        begun = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        begun |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request, tokens in step.num_scheduled_tokens.items():
            first = self.manager.first_block(request)
            assert first is not None, "a scheduled request owns a block"
            drafts = len(step.scheduled_spec_decode_tokens.get(request, ()))
            requests[first] = self._request_step(request, begun[request], tokens, drafts)
        gone = tuple(name for name in self.known if self.manager.first_block(name) is None)
        for request in gone:
            del self.known[request]
            self.serials.pop(request, None)
        self.answered = self.answered and not gone
        short, self.asked = self.asked, False
        if short:
            self.awaited = self.step
        lacking, prefixes = self.manager.take_lacking(), self.manager.prefixes
        if lacking is not None and prefixes is not None:
            self._reclaim(max(1, lacking))
        changes = self.manager.source.changes(self.step)
        orders = ({}, (), {}, BlockCopies()) if prefixes is None else prefixes.orders()
        loads = {} if prefixes is None else prefixes.take_loads()
        return StepMetadata(self.step, requests, gone, short, changes, *orders, loads)

    def note(self, reports: WorkerReport) -> None:
        """Record reported pages, and free surplus blocks."""
        if self.awaited is not None and reports.step >= self.awaited:
            self.awaited = None
        freed = self.manager.source.free_moved(reports.begun)
        for request, told in reports.told.items():
            if self.known.get(request, reports.step + 1) <= reports.step:  # has not restarted
                freed += self.manager.told(request, told.pages, told.computed)
        freed += self.manager.told_prefixes(reports.prefixes, reports.step)
        self.answered = (self.answered or reports.answered) and not freed

    def with_prefixes(self, measured: Measured) -> Measured:
        """Add the uses of prefixes since the last call."""
        if self.manager.prefixes is None:
            return measured
        prefixes = self.manager.prefixes
        counts, held = prefixes.counts(), measured.prefix_bytes + prefixes.other_bytes
        hits, tokens = counts.hits, counts.tokens
        return replace(measured, prefix_bytes=held, prefix_hits=hits, prefix_tokens=tokens)

    def _request_step(self, request: str, computed: int, tokens: int, drafts: int) -> RequestStep:
        prefixes, base, boundary, keep = self.manager.prefixes, None, None, None
        begins = request in self.manager.fresh or computed == 0
        if prefixes is not None:
            found, boundary = prefixes.bases.get(request), prefixes.boundaries.get(request)
            if begins and found is not None and found.tokens == computed:
                base = found.number
                prefixes.began_at(request, found)
            if boundary is not None and computed + tokens - drafts == boundary:
                pages, asked = self._compressed_pages(request, boundary), self.requests[request]
                most = self._room(asked, boundary) if asked.num_preemptions else None
                keep = prefixes.store(request, self.step, pages, most)
        if begins:  # after a preemption generated tokens are recomputed too
            self.manager.fresh.discard(request)
            self.begun += 1
            self.manager.prompts[request] = self.requests[request].num_tokens
            self.known[request], self.serials[request] = self.step, self.begun
        elif tokens - drafts > 1 and computed >= self.manager.prompts[request]:
            self._refuse(
                request,
                f"it adds {tokens - drafts} prompt tokens after its answer, but a policy needs the "
                "whole prompt at once",
            )
        return RequestStep(
            request,
            computed,
            tokens,
            self.manager.prompts[request],
            self.budgets.get(request),
            self.serials[request],
            self.refused.get(request),
            base,
            boundary,
            keep,
            drafts,
        )

    def _compressed_pages(self, request: str, tokens: int) -> int:
        """Return the most pages of a request's first tokens once they are compressed."""
        selector, account = self.policy.selector, self.manager.account
        if selector is None or complete(selector).budget is None:
            return account.pages(tokens)
        kept = budget_tokens(self.policy, tokens, account.token_bytes, self.budgets.get(request))
        return account.planned(tokens, kept, 0)

    def _refuse(self, request: str, reason: str) -> None:
        if request not in self.refused:
            logger.error("request %s fails, as it cannot be served: %s", request, reason)
        self.refused[request] = reason
