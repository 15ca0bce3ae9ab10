"""What a stored prefix has of the layers that vLLM keeps: blocks of windows, chunks and states.

Layers that draft for a model in pages attend to all tokens, so it has all of their blocks.

Tokens after a boundary attend to few blocks before it, and these are in vLLM's own layout, so a
prefix holds them as blocks of vLLM's pool. Nobody writes to a block of keys and values again once
it is full: the prefix has it together with the request that wrote it. A block that later tokens
are written to is copied, and so is every block for a request that continues the prefix.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec

from kv_serve.vllm.drafters import DraftSpec
from kv_serve.vllm.messages import BlockCopies, Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

# Whose blocks later tokens attend to without gaps, up to the newest token.
KINDS: Final = (SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec, DraftSpec)


@dataclass(slots=True)
class OtherLayers:
    """The blocks of the layers that vLLM keeps, at the boundaries of requests.

    Attributes:
        managers: vLLM's, one for each group of these layers.
        pool: the pool of all layers.
        block_bytes: bytes of a block over all layers and workers.
    """

    managers: "Sequence[SingleTypeKVCacheManager]"
    pool: "BlockPool"
    block_bytes: int
    _before: list[tuple[int, int]] = field(default_factory=list)  # copies since the last step
    _after: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def among(
        cls, vllms: "KVCacheManager", ours: type["SingleTypeKVCacheManager"], workers: int
    ) -> "OtherLayers | None":
        """Return the layers that vLLM keeps; None: there are none.

        Args:
            vllms: vLLM's managers, one for each group of layers.
            ours: the type of those of our layers.
            workers: those that divide the heads.
        """
        every = vllms.coordinator.single_type_managers
        managers = [each for each in every if not isinstance(each, ours)]
        if not managers:
            return None
        pool, tensors = vllms.block_pool, vllms.kv_cache_config.kv_cache_tensors
        return cls(managers, pool, tensors[0].size // pool.num_gpu_blocks * workers)

    @property
    def stranger(self) -> str | None:
        """A kind of layers of which it is not known which blocks later tokens attend to."""
        kinds = (type(each.kv_cache_spec) for each in self.managers)
        return next((kind.__name__ for kind in kinds if kind not in KINDS), None)

    @property
    def keeps_all(self) -> bool:
        """Whether these layers keep every token of a request, so that it leaves no boundary."""
        return all(isinstance(each.kv_cache_spec, DraftSpec) for each in self.managers)

    def count(self, tokens: int) -> int:
        """Count the blocks that tokens after the first `tokens` attend to."""
        return sum(len(_columns(each, tokens)) for each in self.managers)

    def copied(self, tokens: int) -> int:
        """Count the blocks that `store` takes from the pool."""
        return sum(_is_written(each, tokens) for each in self.managers)

    def share(self, request: str, tokens: int) -> list[KVCacheBlock]:
        """Return the blocks of a request that ends after `tokens` tokens, held once more."""
        blocks = self._of(request, tokens)
        self.pool.touch(blocks)
        return blocks

    def take(self, tokens: int) -> tuple[list[KVCacheBlock], tuple[Place, ...]]:
        """Take blocks for a document of `tokens` tokens, which the pool has; and say where."""
        found, places = [], []
        for each in self.managers:
            columns = _columns(each, tokens)
            blocks = list(self.pool.get_new_blocks(len(columns)))
            found += blocks
            places.append((columns.start, tuple(block.block_id for block in blocks)))
        return found, tuple(places)

    def store(self, request: str, tokens: int) -> list[KVCacheBlock]:
        """Return the blocks of a prefix of `tokens` tokens, which a request reaches in this step.

        The pool has those that are `copied`.
        """
        found = []
        for each in self.managers:
            blocks = _blocks(each, request, tokens)
            if _is_written(each, tokens):
                (copy,) = self.pool.get_new_blocks(1)
                self._after.append((blocks.pop().block_id, copy.block_id))
                found += [*blocks, copy]
            else:
                found += blocks
            self.pool.touch(blocks)
        return found

    def load(self, blocks: "Sequence[KVCacheBlock]", request: str, tokens: int) -> None:
        """Let a request that begins in this step continue a prefix that has these blocks."""
        pairs = zip(blocks, self._of(request, tokens), strict=True)
        self._before += [(source.block_id, target.block_id) for source, target in pairs]

    def copies(self) -> BlockCopies:
        """Return the copies since the last step."""
        found = BlockCopies(tuple(self._before), tuple(self._after))
        self._before, self._after = [], []
        return found

    def _of(self, request: str, tokens: int) -> list[KVCacheBlock]:
        return [block for each in self.managers for block in _blocks(each, request, tokens)]


def _columns(manager: "SingleTypeKVCacheManager", tokens: int) -> range:
    """Return the columns of a block table that tokens after the first `tokens` attend to."""
    size = manager.block_size
    return range(max(0, manager.get_num_skipped_tokens(tokens)) // size, -(-tokens // size))


def _is_written(manager: "SingleTypeKVCacheManager", tokens: int) -> bool:
    """Return whether later tokens change the last block: it is not full, or it is a state."""
    columns = _columns(manager, tokens)
    partial = tokens % manager.block_size > 0 or isinstance(manager.kv_cache_spec, MambaSpec)
    return len(columns) > 0 and partial


def _blocks(manager: "SingleTypeKVCacheManager", request: str, tokens: int) -> list[KVCacheBlock]:
    columns, held = _columns(manager, tokens), manager.req_to_blocks[request]
    found: list[KVCacheBlock] = held[columns.start : columns.stop]
    assert len(found) == len(columns), "a request has blocks for all of its tokens"
    assert not any(each.is_null for each in found), "vLLM keeps what later tokens attend to"
    return found
