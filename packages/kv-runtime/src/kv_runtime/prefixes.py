"""States of requests at boundaries, which later requests continue without reading the tokens."""

from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from kv_policy import KVPolicy, complete
from kv_runtime.cache import PolicyCache
from kv_runtime.copies import HostCopy
from kv_runtime.saved import CacheState


@dataclass(frozen=True, slots=True)
class PrefixPages:
    """The pages of prefixes stored in a step, on their way to the host."""

    numbers: tuple[int, ...]
    pages: HostCopy | None  # by number; None: nothing was stored

    def read(self) -> dict[int, int]:
        """Return the pages by number, after waiting for that step."""
        if self.pages is None:
            return {}
        return dict(zip(self.numbers, self.pages.read().tolist(), strict=True))


@dataclass(slots=True)
class StoredPrefixes:
    """The compressed tokens of prefixes over a shared pool, by number; one sequence each.

    A prefix never changes. A request continues a copy of its state, which holds the same pages as
    far as the policy only appends to them; see `PolicyCache.branch`.
    """

    caches: dict[int, PolicyCache] = field(default_factory=dict)
    _new: list[int] = field(default_factory=list)  # since `told`

    def store(self, number: int, cache: PolicyCache, sequence: int = 0) -> None:
        """Store the state of a sequence, which continues.

        Raises:
            kv_paging.PoolExhausted: too few pages for those that are copied; nothing has changed.
        """
        self.caches[number] = cache.branch(sequence)
        self._new.append(number)

    def move(self, number: int, cache: PolicyCache, sequence: int) -> None:
        """Store the state of a sequence that is released next; no page is copied."""
        self.caches[number] = cache.branch(sequence, whole=True)
        self._new.append(number)

    def load(self, number: int, empty: PolicyCache, state: CacheState) -> None:
        """Store the state of a file.

        Args:
            number: the number.
            empty: a cache without sequences, over the pool.
            state: of one sequence; it may be from an untrusted file.

        Raises:
            DamagedStateError: the state contradicts itself.
            ValueError: it is of another policy, shape or basis.
            kv_paging.PoolExhausted: too few pages.
        """
        cache = empty.another()
        cache.restore(state)
        self.caches[number] = cache
        self._new.append(number)

    def begin(self, number: int) -> PolicyCache:
        """Return a cache that continues a prefix.

        Raises:
            LookupError: there is no such prefix.
            kv_paging.PoolExhausted: too few pages for those that are copied.
        """
        if number not in self.caches:
            raise LookupError(f"prefix {number} is not stored here; {sorted(self.caches)} are")
        return self.caches[number].branch()

    def drop(self, numbers: Collection[int]) -> None:
        """Release prefixes; those that could not be stored are ignored."""
        for number in numbers:
            cache = self.caches.pop(number, None)
            if cache is not None:
                cache.release()

    def told(self) -> PrefixPages:
        """Begin to count the pages of what was stored since the last call.

        The host does not wait for the device.
        """
        numbers = tuple(each for each in self._new if each in self.caches)
        self._new = []
        batches = [self.caches[each].batch for each in numbers]
        pages = [each.pages_used() for each in batches if each is not None]
        return PrefixPages(numbers, HostCopy.of(torch.cat(pages)) if pages else None)


def appends_only(policy: KVPolicy, *, planned: bool) -> bool:
    """Return whether a request from now on only appends to the pages of the prefix it continues.

    A selector plans all tokens of a request once its prompt has been read, and may then evict from
    any page; some selectors evict nothing later.

    Args:
        policy: the policy.
        planned: whether the request's prompt has been read and planned.
    """
    if policy.selector is None:
        return True
    selector = complete(policy.selector)
    return planned and selector.decode == "grow" and not selector.replan.generating
