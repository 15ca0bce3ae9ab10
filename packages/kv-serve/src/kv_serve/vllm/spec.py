"""The scheduler's accounting of pages: block sizes and blocks per request."""

from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kv_runtime import AHEAD, Account, request_pages
from kv_serve.vllm.attach import attach
from kv_serve.vllm.config import UnservableError, served_policy


@dataclass(frozen=True, kw_only=True)
class PagedSpec(FullAttentionSpec):
    """A layer's share of the blocks that cover pages; equal for all layers."""

    account: Account

    @property
    def prefix_cacheable(self) -> bool:
        """False: the kept tokens of a prefix depend on later tokens."""
        return False

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the bytes of the longest request, for vLLM's check of the memory and its log.

        This is the first call in the scheduler's process, which may not be the workers', so it also
        registers our manager and attaches the connector.
        """
        register()
        attach(vllm_config)
        longest, policy = vllm_config.model_config.max_model_len, served_policy(vllm_config)
        pages = request_pages(policy, self.account, longest)
        return int(self.account.blocks(pages) * self.page_size_bytes)

    @classmethod
    def merge(cls, specs: list["PagedSpec"]) -> "PagedSpec":
        """Return the spec shared by all layers."""
        assert all(spec == specs[0] for spec in specs), "layers of a model share one account"
        return specs[0]


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
    """

    def __init__(self, kv_cache_spec: PagedSpec, **options: Any) -> None:
        """Create the manager; vLLM passes the arguments."""
        super().__init__(kv_cache_spec, **options)
        self.account = kv_cache_spec.account
        self._owned: dict[str, _Owned] = {}
        self.kept: dict[str, int | None] = {}  # budgets that are planned by chunk, by request
        self.prompts: dict[str, int] = {}  # tokens before the first generated one

    def expect_room(self, longest: int, kept: int | None) -> None:
        """Raise if a request of `longest` tokens could never be scheduled.

        All its tokens need blocks until the prompt is compressed, at its end; if that is done after
        each chunk, the `kept` tokens per head and the first generated ones.

        Raises:
            UnservableError: the pool is too small.
        """
        needed, there = self.blocks_for(longest, kept=kept), self.block_pool.num_gpu_blocks - 1
        if needed > there:
            fits = longest * there // needed
            when, less = "until it is compressed", f"max_model_len of about {fits}"
            if kept is not None:
                when, less = f"for a budget of {kept} tokens per head", "smaller budget"
            raise UnservableError(
                f"a request of {longest} tokens takes {needed} blocks {when}, but only {there} "
                f"exist; give vLLM more KV memory or a {less}"
            )

    def blocks_for(
        self,
        tokens: int,
        told: tuple[int, int] | None = None,
        kept: int | None = None,
        later: int = AHEAD,
    ) -> int:
        """Count the blocks for a request, given its last reported pages; see `Account.planned`."""
        most = self.account.planned(tokens, kept, later)
        if told is not None:
            held, computed = told
            most = min(most, self.account.later(held, max(0, tokens - computed)))
        return self.account.blocks(most)

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *more: Any, **options: Any
    ) -> int:
        """Count the additional blocks that a request needs for `num_tokens` tokens."""
        owned, kept = self._owned.get(request_id), self.kept.get(request_id)
        if owned is None:  # vLLM admits it only if its whole prompt could have blocks
            return self.blocks_for(num_tokens, kept=kept)
        later = max(AHEAD, num_tokens - self.prompts.get(request_id, num_tokens))
        return max(0, self.blocks_for(num_tokens, owned.told, kept, later) - len(owned.blocks))

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, *more: Any, **options: Any
    ) -> list[KVCacheBlock]:
        """Allocate the blocks that a request needs; only its first is passed to the worker."""
        missing = self.get_num_blocks_to_allocate(request_id, num_tokens)
        new: list[KVCacheBlock] = self.block_pool.get_new_blocks(missing) if missing else []
        owned = self._owned.get(request_id)
        if owned is not None:
            owned.blocks += new
            owned.tokens = num_tokens
            return []
        self._owned[request_id] = _Owned(new, num_tokens)
        self.req_to_blocks[request_id] = new[:1]
        return new[:1]

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Remove a request and return all its blocks."""
        super().pop_blocks_for_free(request_id)
        owned = self._owned.pop(request_id, None)
        return [] if owned is None else owned.blocks

    def cache_blocks(self, *given: Any, **options: Any) -> None:
        """Do nothing: there is no prefix caching."""

    def first_block(self, request_id: str) -> int | None:
        """Return the number of the block that identifies a request; None if it owns none."""
        owned = self._owned.get(request_id)
        return None if owned is None else owned.blocks[0].block_id

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
            The number of blocks returned to vLLM's pool.
        """
        owned = self._owned.get(request_id)
        if owned is None:
            return 0
        owned.told = (pages, computed)
        keep = self.blocks_for(max(owned.tokens, computed + 1), owned.told)
        surplus = owned.blocks[keep:]
        del owned.blocks[keep:]
        self.block_pool.free_blocks(reversed(surplus))
        return len(surplus)


def register() -> None:
    """Register our manager for our spec with vLLM's scheduler; may be called repeatedly."""
    # If only our spec were registered, vLLM would consider its table complete.
    KVCacheSpecRegistry.check_kv_cache_spec_registry({})
    KVCacheSpecRegistry.register(PagedSpec, PagedManager, FullAttentionSpec)
