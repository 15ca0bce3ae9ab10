"""What the scheduler knows of pages: how large a block is, and how many a request takes."""

from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kv_runtime import Account, kept_tokens
from kv_serve.vllm.attach import attach
from kv_serve.vllm.config import UnservableError, served_policy


@dataclass(frozen=True, kw_only=True)
class PagedSpec(FullAttentionSpec):
    """A layer's share of blocks that pay for pages; all layers have the same."""

    account: Account

    @property
    def prefix_cacheable(self) -> bool:
        """No: what is kept of a prefix depends on what came after it."""
        return False

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of the longest request once its prompt is compressed: what vLLM's capacity states.

        Also the first that the process of the scheduler asks, which may be another than that of the
        workers, so it makes sure of our manager and of the connector.
        """
        register()
        attach(vllm_config)
        policy = served_policy(vllm_config)
        longest = vllm_config.model_config.max_model_len
        kept = kept_tokens(policy, longest, self.account.token_bytes)
        needed: int = self.account.blocks(self.account.pages(kept)) * self.page_size_bytes
        return needed

    @classmethod
    def merge(cls, specs: list["PagedSpec"]) -> "PagedSpec":
        """Give the spec that all layers have."""
        assert all(spec == specs[0] for spec in specs), "layers of a model share one account"
        return specs[0]


@dataclass(slots=True)
class _Owned:
    """What a request owns, and what its pages were when a worker last told."""

    blocks: list[KVCacheBlock]
    tokens: int = 0  # that the blocks are for; workers may be at the newest of them
    told: tuple[int, int] | None = None  # pages, and tokens computed by then


class PagedManager(FullAttentionManager):
    """Gives a request the blocks that pay for its pages, and takes back those it does not need.

    vLLM sees the first block alone, which names the request in the worker's block table: nothing
    else of a block's number means anything, as pages lie wherever there is room.
    """

    def __init__(self, kv_cache_spec: PagedSpec, **options: Any) -> None:
        """Check that there is room for the longest prompt, which is compressed when it has ended.

        Raises:
            UnservableError: there is not; requests of that length would wait forever.
        """
        super().__init__(kv_cache_spec, **options)
        self.account = kv_cache_spec.account
        self._owned: dict[str, _Owned] = {}

    def expect_room(self, longest: int) -> None:
        """Refuse to serve prompts that could never be admitted.

        Raises:
            UnservableError: the pool is too small for a prompt of `longest` tokens.
        """
        needed, there = self.blocks_for(longest), self.block_pool.num_gpu_blocks - 1
        if needed > there:
            fits = longest * there // needed
            raise UnservableError(
                f"a prompt of max_model_len, {longest} tokens, takes {needed} blocks until it is "
                f"compressed, and there are {there}; give vLLM more KV memory or a max_model_len "
                f"of about {fits}"
            )

    def blocks_for(self, tokens: int, told: tuple[int, int] | None = None) -> int:
        """Count the blocks of a request of so many tokens, by what was last told of its pages."""
        most = self.account.pages(tokens)
        if told is not None:
            held, computed = told
            most = min(most, self.account.later(held, max(0, tokens - computed)))
        return self.account.blocks(most)

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *more: Any, **options: Any
    ) -> int:
        """Count the blocks that a request lacks for so many tokens."""
        owned = self._owned.get(request_id)
        if owned is None:
            return self.blocks_for(num_tokens)
        return max(0, self.blocks_for(num_tokens, owned.told) - len(owned.blocks))

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, *more: Any, **options: Any
    ) -> list[KVCacheBlock]:
        """Let a request own the blocks it lacks; only its first is handed on to the worker."""
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
        """Let go of a request, and give all blocks that it owned."""
        super().pop_blocks_for_free(request_id)
        owned = self._owned.pop(request_id, None)
        return [] if owned is None else owned.blocks

    def cache_blocks(self, *given: Any, **options: Any) -> None:
        """Nothing is cached for other requests."""

    def first_block(self, request_id: str) -> int | None:
        """Give the number of the block that names a request; None if it owns none."""
        owned = self._owned.get(request_id)
        return None if owned is None else owned.blocks[0].block_id

    def owned(self, request_id: str) -> tuple[KVCacheBlock, ...]:
        """Give the blocks of a request; the first names it in the worker's block table."""
        owned = self._owned.get(request_id)
        return () if owned is None else tuple(owned.blocks)

    def told(self, request_id: str, pages: int, computed: int) -> int:
        """Take note of a request's pages, and take back the blocks that it does not need.

        Under asynchronous scheduling the next step has its blocks by then, and keeps them.

        Args:
            request_id: the request; if it is gone, nothing happens.
            pages: that it holds.
            computed: its tokens by then.

        Returns:
            Blocks that went back to vLLM's pool.
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
    """Let vLLM's scheduler use our manager for our spec; any number of times."""
    # With a spec of ours alone in it, vLLM would take its table for complete.
    KVCacheSpecRegistry.check_kv_cache_spec_registry({})
    KVCacheSpecRegistry.register(PagedSpec, PagedManager, FullAttentionSpec)
