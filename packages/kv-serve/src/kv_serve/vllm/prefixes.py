"""Prefixes whose compressed tokens stay in free blocks, for requests that continue them.

A prefix is the state of a request at a boundary, as vLLM keeps states of Mamba layers: after the
tokens that a client names (`kv_prefix`), where a request ended, for the next turn of a chat, or
what a file holds.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kv_runtime import Account
from kv_serve.vllm.block_source import BlockSource
from kv_serve.vllm.messages import BlockCopies, Place
from kv_serve.vllm.other_layers import OtherLayers

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request


class Origin(Enum):
    """What a prefix is the state of."""

    FILE = auto()
    NAMED = auto()  # a boundary that a request names
    TURN = auto()  # the end of a request


# Requests that name a boundary continue no turn, so that their answers do not depend on others.
CONTINUED_BY_NAMED: Final = (Origin.FILE, Origin.NAMED)
CONTINUED_BY_OTHERS: Final = (Origin.FILE, Origin.TURN)


@dataclass(slots=True)
class Prefix:
    """A stored prefix; its blocks are free while no request continues it, unless a file has it.

    Beside layers that vLLM keeps, it has its blocks as long as it is stored.
    """

    number: int
    origin: Origin
    key: bytes
    tokens: int
    pages: int  # a bound, until workers report them
    step: int  # the step whose workers store it
    ready: bool = False  # workers have stored it, or will before a request continues it
    told: bool = False  # workers have reported its pages
    users: set[str] = field(default_factory=set)  # requests that hold pages of it
    blocks: list[KVCacheBlock] = field(default_factory=list)  # for its pages
    others: list[KVCacheBlock] = field(default_factory=list)  # of layers that vLLM keeps
    pinned: bool = False  # it is of a file, whose memory is not taken by requests

    @property
    def idle(self) -> bool:
        """Whether its memory counts as free."""
        return not self.users and not self.pinned


@dataclass(frozen=True, slots=True)
class PrefixCounts:
    """Uses of prefixes since the last call of `Prefixes.counts`."""

    hits: int = 0
    tokens: int = 0  # that were not read again


@dataclass(slots=True)
class Prefixes:
    """All prefixes of an engine, the least recently used one first.

    Blocks are units of account, so a prefix that no request continues owns none: there are as many
    free blocks as all of these need, or the least recently used ones are dropped. While a request
    continues a prefix, its blocks are in use, once for all requests.

    Beside layers that vLLM keeps, a free block may be theirs a moment later. There a prefix always
    has its blocks, and it is dropped when requests lack some.
    """

    account: Account
    source: BlockSource
    pool: "BlockPool"  # vLLM's
    others: OtherLayers | None = None  # None: vLLM keeps no other layers
    turns: bool = False  # whether the states of finished requests are stored
    stored: dict[int, Prefix] = field(default_factory=dict)
    boundaries: dict[str, int] = field(default_factory=dict)  # that requests name
    bases: dict[str, Prefix] = field(default_factory=dict)  # that requests continue, or will
    kept: dict[str, int] = field(default_factory=dict)  # since the last step, by finished request
    reached: dict[str, int] = field(default_factory=dict)  # tokens of these requests
    dropped: list[int] = field(default_factory=list)  # since the last step
    # Documents that workers load in the first step, beside layers that vLLM keeps.
    loads: dict[int, tuple[Place, ...]] = field(default_factory=dict)
    _by_key: dict[tuple[Origin, bytes], Prefix] = field(default_factory=dict)
    _readers: dict[bytes, str] = field(default_factory=dict)  # requests that will store a prefix
    _keys: dict[str, bytes] = field(default_factory=dict)  # of the boundaries, by request
    _last: int = 0  # number of the newest prefix
    _hits: int = 0
    _tokens: int = 0

    def welcome(self, request: "Request", boundary: int, budget: str) -> None:
        """Note the boundary that a new request names."""
        name = request.request_id
        self.boundaries[name] = boundary
        self._keys[name] = keys_of(request, [boundary], budget)[boundary]

    def load(self, number: int, ids: tuple[int, ...], pages: int) -> None:
        """Add a prefix that workers have loaded from a file; its blocks are in use until `reset`.

        Args:
            number: its number, which is the next one.
            ids: its tokens.
            pages: the most pages that it has.

        Raises:
            ValueError: there are too few free blocks, or the same tokens were loaded.
        """
        digest = _begun(None, None, "")
        digest.update(_bytes(ids))
        key, blocks = digest.digest(), self.account.blocks(pages)
        beside = 0 if self.others is None else self.others.count(len(ids))
        free = self.pool.get_num_free_blocks()
        if (Origin.FILE, key) in self._by_key:
            raise ValueError("its tokens are those of another document")
        if blocks + beside > free:
            raise ValueError(f"it takes {blocks + beside} blocks, and {free} are free")
        prefix = self._made(Origin.FILE, key, len(ids), pages, 1)  # which the first step reports
        assert prefix.number == number, "documents are loaded first, in their order"
        prefix.blocks, prefix.ready, prefix.pinned = self.source.allocate(blocks), True, True
        if self.others is not None:
            prefix.others, self.loads[number] = self.others.take(len(ids))

    @property
    def loaded_blocks(self) -> int:
        """Blocks of prefixes from files."""
        pinned = (each for each in self.stored.values() if each.pinned)
        return sum(len(each.blocks) + len(each.others) for each in pinned)

    def pages_of(self, request: str) -> int:
        """Return the pages of all prefixes that hold pages of a request, at most."""
        return sum(each.pages for each in self.stored.values() if request in each.users)

    def match(self, request: "Request", budget: str) -> int | None:
        """Return the tokens of the longest prefix that a waiting request continues.

        A request whose boundary another one is about to reach waits for it.

        Returns:
            None: the request waits.
        """
        name = request.request_id
        self.bases.pop(name, None)
        if request.skip_reading_prefix_cache:
            return 0
        boundary, most = self.boundaries.get(name), request.num_tokens - 1
        origins = CONTINUED_BY_OTHERS if boundary is None else CONTINUED_BY_NAMED
        lengths = {each.tokens for each in self.stored.values() if each.origin in origins}
        if boundary is not None:
            lengths.add(boundary)
        found = keys_of(request, [each for each in lengths if each <= most], budget)
        for length in sorted(found, reverse=True):
            for origin in origins:
                prefix = self._by_key.get((origin, found[length]))
                named = origin is not Origin.NAMED or length == boundary
                if named and prefix is not None and prefix.ready:
                    self.bases[name] = prefix
                    self._touch(prefix)
                    return length
            if length == boundary and self._readers.get(found[length], name) != name:
                return None
        return 0

    def blocks_of(self, request: str) -> int:
        """Count the blocks that a prefix takes once a request continues it."""
        prefix = self.bases.get(request)
        return self._missing(prefix) if prefix is not None and prefix.idle else 0

    def size(self, prefix: Prefix) -> int:
        """Count the blocks of a prefix, of all layers."""
        return self._count(prefix) + len(prefix.others)

    def began(self, request: str) -> None:
        """Note that a request has blocks: it continues its prefix, or reads all tokens."""
        prefix, key = self.bases.get(request), self._keys.get(request)
        if prefix is not None:
            self._use(prefix, request)
            self._hits, self._tokens = self._hits + 1, self._tokens + prefix.tokens
        if key is None or (Origin.NAMED, key) in self._by_key:
            return
        if prefix is None or prefix.tokens < self.boundaries[request]:
            self._readers.setdefault(key, request)

    def store(self, request: str, step: int, pages: int, most: int | None = None) -> int | None:
        """Take blocks for the tokens up to a request's boundary, which its step reaches.

        Args:
            request: the request, which continues the prefix.
            step: the number of the step.
            pages: the most pages of the prefix.
            most: the most blocks that it may have; None: as many as are free.

        Returns:
            The number of the prefix; None: it is stored already, or there are too few free blocks.
        """
        key, tokens = self._keys[request], self.boundaries[request]
        if self._readers.get(key) != request:
            return None
        blocks, others = self.account.blocks(pages), self.others
        beside, copied = (others.count(tokens), others.copied(tokens)) if others else (0, 0)
        fits = most is None or blocks + beside <= most
        if not fits or not self._make_room(blocks, copied):
            del self._readers[key]
            return None
        prefix = self._made(Origin.NAMED, key, tokens, pages, step)
        self._use(prefix, request)
        if others is not None:
            prefix.others = others.store(request, tokens)
        self.trim()
        return prefix.number

    def began_at(self, request: str, prefix: Prefix) -> None:
        """Let a request that begins in this step have what a prefix has of other layers."""
        if self.others is not None:
            self.others.load(prefix.others, request, prefix.tokens)

    def keep(
        self,
        request: "Request",
        tokens: int,
        budget: str,
        step: int,
        pages: int,
        own: list[KVCacheBlock],
    ) -> None:
        """Store the state of a finished request, all of whose computed tokens are known.

        Args:
            request: the request, whose blocks vLLM is about to free.
            tokens: its computed tokens, without drafts that were wrong.
            budget: its budget.
            step: the number of the next step.
            pages: the most pages that it holds.
            own: its blocks; the prefix takes those that it needs at once.
        """
        if tokens > request.num_tokens:
            return
        leaves = self.others is not None and not self.others.keeps_all
        if leaves and tokens < request.num_computed_tokens:
            return  # a draft was right after the end, so other layers may have left this boundary
        key = keys_of(request, [tokens], budget)[tokens]
        known = self._by_key.get((Origin.TURN, key))
        if known is not None:
            self._touch(known)
            return
        taken: list[KVCacheBlock] = []
        if self.others is not None:
            blocks = self.account.blocks(pages)
            more = max(0, blocks - len(own))
            if not self._make_room(more, 0):
                return
            taken = own[:blocks] + self.source.allocate(more)
            del own[:blocks]
        prefix = self._made(Origin.TURN, key, tokens, pages, step)
        prefix.blocks = taken
        if self.others is not None:
            prefix.others = self.others.share(request.request_id, tokens)
        prefix.ready = True  # workers need no memory for it, and store it first in a step
        self.kept[request.request_id], self.reached[request.request_id] = prefix.number, tokens

    def left(self, request: str) -> list[KVCacheBlock]:
        """Let a request end or be preempted; return the blocks of prefixes that it was last in."""
        self.bases.pop(request, None)
        key = self._keys.get(request)
        if key is not None and self._readers.get(key) == request:
            del self._readers[key]
        blocks: list[KVCacheBlock] = []
        for prefix in [each for each in self.stored.values() if request in each.users]:
            prefix.users.discard(request)
            if not prefix.idle:
                continue
            if self.others is None:
                blocks += self._released(prefix)
            self._touch(prefix)
            if self._by_key.get((prefix.origin, prefix.key)) is not prefix:  # forgotten meanwhile
                self._drop(prefix)
        return blocks

    def finished(self, request: str) -> None:
        """Forget the boundary of a request, which has no blocks or is about to free them."""
        self.boundaries.pop(request, None)
        self._keys.pop(request, None)

    def told(self, pages: Mapping[int, int], step: int) -> list[KVCacheBlock]:
        """Record the pages of what a step's workers stored; return blocks that are not needed.

        What they could not store is forgotten.
        """
        surplus: list[KVCacheBlock] = []
        for prefix in [each for each in self.stored.values() if not each.told]:
            held = pages.get(prefix.number)
            if held is not None:
                prefix.pages, prefix.ready, prefix.told = held, True, True
                self._end_reading(prefix)
                if self.others is not None or not prefix.idle:
                    count, free = self._count(prefix), self.pool.get_num_free_blocks()
                    prefix.blocks += self.source.allocate(min(self._missing(prefix), free))
                    surplus += self.source.release(prefix.blocks[count:])
                    del prefix.blocks[count:]
            elif prefix.step <= step:
                self._end_reading(prefix)
                surplus += self._released(prefix)
                self._drop(prefix)
        return surplus

    def trim(self) -> None:
        """Drop the least recently used prefixes for which there are no free blocks any more."""
        if self.others is not None:
            return
        idle = [each for each in self.stored.values() if each.idle]
        total, free = sum(map(self._count, idle)), self.pool.get_num_free_blocks()
        for prefix in idle:
            if total <= free:
                return
            total -= self._count(prefix)
            self._drop(prefix)

    def give_up(self, blocks: int) -> bool:
        """Drop prefixes that have about so many blocks, the least recently used ones first.

        Returns:
            Whether blocks are idle or free that were not before.
        """
        given = 0
        if self.others is not None:
            for prefix in [each for each in self.stored.values() if each.idle]:
                if given < blocks:
                    given += len(prefix.blocks) + len(prefix.others)
                    self._drop(prefix)
        return given > 0

    def reset(self) -> list[KVCacheBlock]:
        """Drop all prefixes, those in use once their requests have ended; return free blocks."""
        blocks: list[KVCacheBlock] = []
        self._by_key.clear()
        for prefix in list(self.stored.values()):
            prefix.pinned = False
            if prefix.idle:
                blocks += self._released(prefix)
                self._drop(prefix)
        return blocks

    def orders(self) -> tuple[dict[str, int], tuple[int, ...], dict[str, int], BlockCopies]:
        """Return what was kept and dropped since the last step.

        With the tokens of what was kept, and the copies of other layers.
        """
        kept, self.kept = self.kept, {}
        dropped, self.dropped = tuple(self.dropped), []
        reached, self.reached = self.reached, {}
        copies = BlockCopies() if self.others is None else self.others.copies()
        return kept, dropped, reached, copies

    def take_loads(self) -> dict[int, tuple[Place, ...]]:
        """Return the documents that workers load in this step, with blocks of other layers."""
        loads, self.loads = self.loads, {}
        return loads

    @property
    def other_bytes(self) -> int:
        """Bytes that prefixes have of layers that vLLM keeps."""
        if self.others is None:
            return 0
        blocks = {each.block_id for prefix in self.stored.values() for each in prefix.others}
        return len(blocks) * self.others.block_bytes

    def counts(self) -> PrefixCounts:
        """Return the uses since the last call."""
        found = PrefixCounts(self._hits, self._tokens)
        self._hits = self._tokens = 0
        return found

    def _made(self, origin: Origin, key: bytes, tokens: int, pages: int, step: int) -> Prefix:
        self._last += 1
        made = Prefix(self._last, origin, key, tokens, pages, step)
        self.stored[made.number] = self._by_key[origin, key] = made
        return made

    def _released(self, prefix: Prefix) -> list[KVCacheBlock]:
        """Take the blocks of a prefix; return those to be freed in vLLM's pool."""
        blocks, prefix.blocks = prefix.blocks, []
        return self.source.release(blocks)

    def _use(self, prefix: Prefix, request: str) -> None:
        if prefix.idle:
            prefix.blocks += self.source.allocate(self._missing(prefix))
        prefix.users.add(request)
        self._touch(prefix)

    def _touch(self, prefix: Prefix) -> None:
        self.stored[prefix.number] = self.stored.pop(prefix.number)

    def _drop(self, prefix: Prefix) -> None:
        del self.stored[prefix.number]
        if self._by_key.get((prefix.origin, prefix.key)) is prefix:
            del self._by_key[prefix.origin, prefix.key]
        self.dropped.append(prefix.number)
        freed, prefix.others = [*self._released(prefix), *prefix.others], []
        self.pool.free_blocks(reversed(freed))

    def _make_room(self, blocks: int, beside: int) -> bool:
        """Return whether blocks are free, so many for pages and so many for other layers.

        Idle prefixes that have blocks are dropped for them.
        """
        while self.source.missing(blocks) + beside > self.pool.get_num_free_blocks():
            if not self.give_up(1):
                return False
        return True

    def _end_reading(self, prefix: Prefix) -> None:
        if prefix.origin is Origin.NAMED:
            self._readers.pop(prefix.key, None)

    def _count(self, prefix: Prefix) -> int:
        return self.account.blocks(prefix.pages)

    def _missing(self, prefix: Prefix) -> int:
        return max(0, self._count(prefix) - len(prefix.blocks))


def has_other_inputs(request: "Request") -> bool:
    """Return whether a request's tokens do not say all that it reads: pictures, or embeddings."""
    return bool(request.mm_features) or request.prompt_embeds is not None


def keys_of(request: "Request", lengths: Iterable[int], budget: str) -> dict[int, bytes]:
    """Return the key of a request's first tokens, for each length.

    Keys differ if the tokens, the LoRA adapter, the cache salt or the budget does.
    """
    lora = None if request.lora_request is None else request.lora_request.lora_name
    digest = _begun(lora, request.cache_salt, budget)
    found, begin, ids = {}, 0, request.all_token_ids
    for length in sorted({*lengths}):
        digest.update(_bytes(ids[begin:length]))
        found[length], begin = digest.digest(), length
    return found


def _begun(lora: str | None, salt: str | None, budget: str) -> "Hash":
    """Return the hash of no token; more tokens are added by `update`."""
    of = repr((lora, salt, budget)).encode()
    return sha256(sha256(of).digest())


def _bytes(ids: Sequence[int]) -> bytes:
    return array("q", ids).tobytes()
