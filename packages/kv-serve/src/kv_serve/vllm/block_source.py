"""The blocks that hold pages: from a pool of our own, or from one shared with other layers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kv_serve.vllm.messages import BlockChanges

# One of so many blocks may stay idle while requests run, as the next ones often take it again.
SPARE: Final = 32


@runtime_checkable
class BlockSource(Protocol):
    """Where a manager allocates blocks."""

    @property
    def most(self) -> int:
        """The most blocks that can hold pages."""
        ...

    def missing(self, count: int) -> int:
        """Return how many of `count` blocks vLLM's pool must have."""
        ...

    def allocate(self, count: int) -> list[KVCacheBlock]:
        """Allocate blocks; the pool has those that are missing."""
        ...

    def release(self, blocks: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        """Take blocks back from a request; return those to be freed in vLLM's pool now."""
        ...

    def changes(self, step: int) -> BlockChanges:
        """Begin a step; return the changes of the blocks that may hold pages."""
        ...

    def free_moved(self, step: int) -> int:
        """Free the blocks that a step's workers moved pages out of; return their number."""
        ...

    def reclaim(self) -> bool:
        """Ask for all idle blocks in the next step; return whether vLLM's pool will have more."""
        ...


@dataclass(frozen=True, slots=True)
class OwnPool:
    """A pool of which every block may hold pages at any time: the memory has no other layers."""

    pool: BlockPool

    @property
    def most(self) -> int:
        """All blocks but vLLM's null block."""
        return int(self.pool.num_gpu_blocks) - 1

    def missing(self, count: int) -> int:
        """Return `count`."""
        return count

    def allocate(self, count: int) -> list[KVCacheBlock]:
        """Allocate blocks from the pool."""
        return list(self.pool.get_new_blocks(count)) if count else []

    def release(self, blocks: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        """Return all blocks: pages need not move out of them."""
        return list(blocks)

    def changes(self, step: int) -> BlockChanges:
        """Return no changes."""
        return BlockChanges()

    def free_moved(self, step: int) -> int:
        """Free nothing."""
        return 0

    def reclaim(self) -> bool:
        """Return False: no block is idle."""
        return False


@dataclass(slots=True)
class SharedPool:
    """Blocks from a pool that other layers use, too; pages are in the blocks taken from it.

    A block that no request owns stays idle until it is taken again, or until workers have moved the
    pages of others out of it: then it is freed. Until then it is in use for vLLM. Once no request
    owns a block, all are freed at once, as no page is held.

    The last block is taken for good: the last page of the memory is the scratch page.
    """

    pool: BlockPool
    owned: int = 0  # blocks of requests
    idle: list[KVCacheBlock] = field(default_factory=list)
    moving: dict[int, list[KVCacheBlock]] = field(default_factory=dict)  # by step
    _taken: set[int] = field(default_factory=set)  # since the last step
    _left: set[int] = field(default_factory=set)  # since the last step
    _reclaimed: bool = False

    def __post_init__(self) -> None:
        """Take the last block."""
        last = self.pool.blocks[-1]
        self.pool.touch([last])
        self._taken.add(last.block_id)

    @property
    def most(self) -> int:
        """All blocks but vLLM's null block and the last."""
        return int(self.pool.num_gpu_blocks) - 2

    def missing(self, count: int) -> int:
        """Return how many of `count` blocks are not idle."""
        return max(0, count - len(self.idle))

    def allocate(self, count: int) -> list[KVCacheBlock]:
        """Allocate idle blocks, and those that are missing from the pool."""
        missing = self.missing(count)
        new = list(self.pool.get_new_blocks(missing)) if missing else []
        self._taken |= {block.block_id for block in new}
        at = len(self.idle) - (count - missing)
        found, self.idle = self.idle[at:], self.idle[:at]
        self.owned += count
        return found + new

    def release(self, blocks: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        """Keep the blocks idle, and return none; or all idle blocks, if requests own no other."""
        self.idle += blocks
        self.owned -= len(blocks)
        if self.owned:
            return []
        freed, self.idle = self.idle, []
        numbers = {block.block_id for block in freed}
        self._left |= numbers - self._taken  # workers do not know the others
        self._taken -= numbers
        return freed

    def changes(self, step: int) -> BlockChanges:
        """Return the changes since the last step, and idle blocks to move pages out of."""
        stay = 0 if self._reclaimed else self.owned // SPARE
        leaving, self.idle = self.idle[stay:], self.idle[:stay]
        if leaving:
            self.moving[step] = leaving
        taken, self._taken = tuple(sorted(self._taken)), set()
        left, self._left, self._reclaimed = tuple(sorted(self._left)), set(), False
        return BlockChanges(left, taken, tuple(block.block_id for block in leaving))

    def free_moved(self, step: int) -> int:
        """Free the blocks that workers moved pages out of, up to a step."""
        done = [each for each in self.moving if each <= step]
        blocks = [block for each in done for block in self.moving.pop(each)]
        self.pool.free_blocks(blocks)
        return len(blocks)

    def reclaim(self) -> bool:
        """Ask for all idle blocks; return whether any is idle or on its way."""
        self._reclaimed = bool(self.idle)
        return self._reclaimed or bool(self.moving)
