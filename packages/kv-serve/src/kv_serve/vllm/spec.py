"""The scheduler's accounting of pages: block sizes and blocks per request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kv_runtime import AHEAD, Account, request_pages
from kv_serve.vllm.adapters import complete_scheduler
from kv_serve.vllm.attach import attach, disable_prefix_cache
from kv_serve.vllm.block_source import BlockSource, OwnPool, SharedPool
from kv_serve.vllm.config import UnservableError, served_policy
from kv_serve.vllm.documents import LoadedDocument
from kv_serve.vllm.other_layers import OtherLayers
from kv_serve.vllm.prefixes import Prefixes

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, kw_only=True)
class PagedSpec(FullAttentionSpec):
    """A layer's share of the blocks that cover pages; equal for all layers.

    Attributes:
        account: the pages of a request, with blocks over all layers under the policy.
        kept: whether vLLM keeps other layers; their blocks are of the same pool.
        layers: layers in a group, once vLLM has divided them; 0: not divided.
    """

    account: Account
    kept: bool = False
    layers: int = 0

    @property
    def prefix_cacheable(self) -> bool:
        """False: the kept tokens of a prefix depend on later tokens."""
        return False

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the bytes of the longest request, for vLLM's check of the memory and its log.

        This is the first call in the scheduler's process, which may not be the workers', so it also
        registers our manager, attaches the connector, and disables prefix caching where vLLM would
        find prefixes in the blocks of other layers alone.
        """
        register()
        complete_scheduler()
        attach(vllm_config)
        if self.kept:
            disable_prefix_cache(vllm_config)
        longest, policy = vllm_config.model_config.max_model_len, served_policy(vllm_config)
        pages = request_pages(policy, self.account, longest)
        return int(self.account.blocks(pages) * self.page_size_bytes)  # this group's share

    @classmethod
    def merge(cls, specs: list["PagedSpec"]) -> "PagedSpec":
        """Return the spec shared by all layers of a group."""
        assert all(spec == specs[0] for spec in specs), "layers of a model share one account"
        return replace(specs[0], layers=len(specs))

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Return whether all specs are of this type, and so share a block table."""
        return all(isinstance(spec, PagedSpec) for spec in kv_cache_specs.values())

    @property
    def block(self) -> Account:
        """The account with the blocks of a group, which cover the pages of all groups."""
        if not self.layers:
            return self.account
        return self.account.holding(self.layers * self.page_size_bytes)


@dataclass(slots=True)
class _Owned:
    """The blocks of a request, and its pages as last reported by a worker."""

    blocks: list[KVCacheBlock]
    tokens: int = 0  # tokens covered by the blocks; workers may have reached the newest
    told: tuple[int, int] | None = None  # reported pages and tokens computed


class PagedManager(FullAttentionManager):
    """Allocates the blocks that cover a request's pages, and frees surplus blocks.

    vLLM sees only the first block, whose number identifies the request in the worker's block table.
    Block numbers have no other meaning, as pages are allocated from a separate pool.

    Beside layers that vLLM keeps, pages are in the blocks of all requests together, and in no
    other; see `SharedPool`. There are several managers if vLLM divides our layers into groups: the
    first allocates for all, and the others only identify a request by the same block.
    """

    def __init__(self, kv_cache_spec: PagedSpec, **options: Any) -> None:
        """Create the manager; vLLM passes the arguments."""
        super().__init__(kv_cache_spec, **options)
        self.account = kv_cache_spec.block
        self.source: BlockSource = OwnPool(self.block_pool)
        self._leader: PagedManager | None = None  # None: this is the manager of our first group
        self._owned: dict[str, _Owned] = {}
        self.kept: dict[str, int | None] = {}  # budgets that are planned by chunk, by request
        self.prompts: dict[str, int] = {}  # tokens before the first generated one
        self.fresh: set[str] = set()  # requests that have blocks since the last step
        self.prefixes: Prefixes | None = None  # None: none are stored
        self._lacking: dict[str, int] = {}  # blocks that requests wanted since the last step
        self.ahead = AHEAD  # generated tokens that are scheduled before their pages are counted
        self.appends_only = False  # whether requests only append to what their prefix holds

    def lead(self, others: Sequence["PagedManager"]) -> None:
        """Allocate for all groups of our layers; called once, before the first request.

        Args:
            others: the managers of the other groups, all later than this one.
        """
        for each in others:
            each._leader = self
        if self.kv_cache_spec.kept:
            self.source = SharedPool(self.block_pool)

    def store_prefixes(
        self, *, turns: bool, appends_only: bool, others: OtherLayers | None = None
    ) -> None:
        """Store prefixes in free blocks, or in blocks of their own if blocks are of other layers.

        Args:
            turns: whether the states of finished requests are stored.
            appends_only: whether requests only append to the pages of the prefix they continue.
            others: the layers that vLLM keeps; None: there are none.
        """
        pool = self.block_pool
        self.appends_only = appends_only
        self.prefixes = Prefixes(self.account, self.source, pool, others, turns)
        reset = pool.reset_prefix_cache

        def reset_all() -> bool:  # as when weights have changed
            self.reset_prefixes()
            return others is not None or bool(reset())  # else vLLM itself stores none

        pool.reset_prefix_cache = reset_all

    def load(self, document: LoadedDocument) -> None:
        """Take blocks for a document that workers have loaded.

        Raises:
            UnservableError: there are too few.
        """
        assert self.prefixes is not None, "documents are refused without prefix caching"
        pages = document.most_pages(self.account)
        try:
            self.prefixes.load(document.number, document.ids, pages)
        except ValueError as error:
            raise UnservableError(f"{document.path} cannot be served: {error}") from error

    def reset_prefixes(self) -> None:
        """Drop all stored prefixes."""
        if self.prefixes is not None:
            self.block_pool.free_blocks(reversed(self.prefixes.reset()))

    def most_pages(self, request_id: str, tokens: int) -> int:
        """Return the most pages of a request after `tokens` tokens, with those of prefixes."""
        owned, most = self._owned[request_id], self.account.pages(tokens)
        if owned.told is None:
            return most
        held, computed = owned.told
        shared = 0 if self.prefixes is None else self.prefixes.pages_of(request_id)
        return min(most, self.account.later(held + shared, max(0, tokens - computed)))

    def expect_room(self, longest: int, kept: int | None, others: int = 0) -> None:
        """Raise if a request of `longest` tokens could never be scheduled.

        All its tokens need blocks until the prompt is compressed, at its end; if that is done after
        each chunk, the `kept` tokens per head and the first generated ones. `others` are the blocks
        of layers that vLLM keeps.

        Raises:
            UnservableError: the pool is too small.
        """
        needed, there = self.blocks_for(longest, kept=kept), self.source.most - others
        if self.prefixes is not None:
            there -= self.prefixes.loaded_blocks
        if needed > there:
            fits = max(1, longest * there // needed)
            when, less = "until it is compressed", f"max_model_len of about {fits}"
            if kept is not None:
                when, less = f"for a budget of {kept} tokens per head", "smaller budget"
            beside = f" beside the {others} of other layers" if others else ""
            raise UnservableError(
                f"a request of {longest} tokens takes {needed} blocks {when}, but only "
                f"{max(0, there)} exist{beside}; give vLLM more KV memory or a {less}"
            )

    def blocks_for(
        self,
        tokens: int,
        told: tuple[int, int] | None = None,
        kept: int | None = None,
        later: int | None = None,
        base: int | None = None,
    ) -> int:
        """Count the blocks for a request, given its last reported pages; see `Account.planned`.

        Without `later`, for as many generated tokens as are scheduled ahead of reports.
        With `base`, those for the pages that it holds alone after so many tokens of a prefix.
        """
        most = self.account.planned(tokens, kept, self.ahead if later is None else later)
        if base is not None:
            most = min(most, self.account.branched(tokens - base))
        if told is not None:
            held, computed = told
            most = min(most, self.account.later(held, max(0, tokens - computed)))
        return self.account.blocks(most)

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *more: Any, **options: Any
    ) -> int:
        """Count the blocks of vLLM's pool that a request needs for `num_tokens` tokens."""
        if self._leader:
            return 0
        wanted = self._missing(request_id, num_tokens)
        if self.prefixes is not None and request_id not in self._owned:
            wanted += self.prefixes.blocks_of(request_id)
        self._lacking[request_id] = wanted
        return self.source.missing(wanted)

    def take_lacking(self) -> int | None:
        """Return the blocks that requests wanted since the last call, and vLLM could not allocate.

        Returns:
            None: it has allocated all; 0: those of other layers were lacking.
        """
        lacking, self._lacking = self._lacking, {}
        return sum(lacking.values()) if lacking else None

    def room(self, request_id: str, tokens: int, base: int) -> int:
        """Return the most blocks that a prefix of `base` tokens may have beside a request.

        Args:
            request_id: the request, which continues the prefix.
            tokens: the most tokens of the request.
            base: tokens of the prefix.
        """
        own = base if self.appends_only else None
        most = self.source.most - self.blocks_for(tokens, kept=self.kept.get(request_id), base=own)
        return most - (0 if self.prefixes is None else self.prefixes.loaded_blocks)

    def _missing(self, request_id: str, num_tokens: int) -> int:
        owned, kept = self._owned.get(request_id), self.kept.get(request_id)
        base = self._base(request_id)
        if owned is None:  # vLLM admits it only if its whole prompt could have blocks
            return self.blocks_for(num_tokens, kept=kept, base=base)
        later = max(self.ahead, num_tokens - self.prompts.get(request_id, num_tokens))
        wanted = self.blocks_for(num_tokens, owned.told, kept, later, base)
        return max(0, wanted - len(owned.blocks))

    def _base(self, request_id: str) -> int | None:
        """Return the tokens of a request's prefix, if it only appends to the pages of it."""
        base = None if self.prefixes is None else self.prefixes.bases.get(request_id)
        return base.tokens if base is not None and self.appends_only else None

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, *more: Any, **options: Any
    ) -> list[KVCacheBlock]:
        """Allocate the blocks that a request needs; only its first is passed to the worker."""
        if self._leader is not None:
            return self._follow(request_id, self._leader)
        new, prefixes = self.source.allocate(self._missing(request_id, num_tokens)), self.prefixes
        self._lacking.pop(request_id, None)
        owned, first = self._owned.get(request_id), new[:1]
        if owned is not None:
            owned.blocks += new
            owned.tokens, first = num_tokens, []
        else:
            self._owned[request_id] = _Owned(new, num_tokens)
            self.req_to_blocks[request_id] = new[:1]
            self.fresh.add(request_id)
            if prefixes is not None:
                prefixes.began(request_id)
        if prefixes is not None and new:
            prefixes.trim()
        return first

    def add_local_computed_blocks(self, *given: Any, **options: Any) -> None:
        """Do nothing: vLLM finds no prefix in our blocks."""

    def allocate_external_computed_blocks(self, *given: Any, **options: Any) -> None:
        """Do nothing: the blocks of a prefix are allocated with those of its request."""

    def _follow(self, request_id: str, leader: "PagedManager") -> list[KVCacheBlock]:
        if request_id in self.req_to_blocks:
            return []
        self.req_to_blocks[request_id] = first = leader.req_to_blocks[request_id][:1]
        return list(first)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Remove a request, and return the blocks to be freed in vLLM's pool now.

        Those of its prefix are free once no request continues it.
        """
        super().pop_blocks_for_free(request_id)
        owned = self._owned.pop(request_id, None)
        freed = [] if owned is None else self.source.release(owned.blocks)
        if self.prefixes is not None:
            freed += self.prefixes.left(request_id)
        self.fresh.discard(request_id)
        self._lacking.pop(request_id, None)
        return freed

    def cache_blocks(self, *given: Any, **options: Any) -> None:
        """Do nothing: there is no prefix caching."""

    def first_block(self, request_id: str) -> int | None:
        """Return the number of the block that identifies a request; None if it owns none."""
        owned = self._owned.get(request_id)
        return owned.blocks[0].block_id if owned is not None and owned.blocks else None

    def owned(self, request_id: str) -> tuple[KVCacheBlock, ...]:
        """Return the blocks of a request; the first identifies it in the worker's block table."""
        owned = self._owned.get(request_id)
        return () if owned is None else tuple(owned.blocks)

    def told(self, request_id: str, pages: int, computed: int) -> int:
        """Record a request's reported pages, and free the blocks that it does not need.

        Under asynchronous scheduling the next step is already scheduled, and keeps its blocks.

        Args:
            request_id: the request; ignored if it has ended.
            pages: the pages it holds.
            computed: its tokens computed at the time of the report.

        Returns:
            The number of blocks that it gives up.
        """
        owned = self._owned.get(request_id)
        if owned is None:
            return 0
        owned.told = (pages, computed)
        base = self._base(request_id)
        keep = self.blocks_for(max(owned.tokens, computed + 1), owned.told, base=base)
        surplus = owned.blocks[keep:]
        del owned.blocks[keep:]
        self.block_pool.free_blocks(reversed(self.source.release(surplus)))
        return len(surplus)

    def keep(self, request: "Request", tokens: int, budget: str, step: int) -> None:
        """Store the state of a finished request after `tokens`, before its blocks are freed."""
        assert self.prefixes is not None, "the state is to be stored"
        name = request.request_id
        pages = self.most_pages(name, tokens)
        self.prefixes.keep(request, tokens, budget, step, pages, self._owned[name].blocks)

    def told_prefixes(self, pages: Mapping[int, int], step: int) -> int:
        """Record the pages of prefixes that a step's workers stored.

        Returns:
            The number of blocks that they give up.
        """
        if self.prefixes is None:
            return 0
        surplus = self.prefixes.told(pages, step)
        self.block_pool.free_blocks(reversed(surplus))
        return len(surplus)


def register() -> None:
    """Register our manager for our spec with vLLM's scheduler; may be called repeatedly."""
    # If only our spec were registered, vLLM would consider its table complete.
    KVCacheSpecRegistry.check_kv_cache_spec_registry({})
    KVCacheSpecRegistry.register(PagedSpec, PagedManager, FullAttentionSpec)
