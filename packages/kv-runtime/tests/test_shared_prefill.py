"""Caches over one pool: who holds which pages after another, join, compress and release."""

import pytest
import torch
from torch import Tensor

from kv_paging import PagePool
from kv_policy import Budget, parse
from kv_runtime.cache import PolicyCache
from tiered_policies import SHAPE

PAGE, POISON, PAGES = 4, 0xFF, 400
HEADS = SHAPE.layers * SHAPE.kv_heads
BUDGET = 12
COMPRESS = f"kv-compress:budget={BUDGET},window=4,recent=4"
SHORT = f"{COMPRESS},short=true"


class PageReservation:
    """A poisoned pool, and caches over it that read random tokens."""

    def __init__(self, text: str = SHORT) -> None:
        policy = parse(text)
        size = PolicyCache(policy, SHAPE, page_tokens=PAGE).layout.page_bytes
        self.memory = torch.full((PAGES + 1, size), POISON, dtype=torch.uint8)  # and a scratch page
        self.pool = PagePool.over(self.memory, poison=True)
        self.first = PolicyCache(policy, SHAPE, page_tokens=PAGE, pool=self.pool, backend="torch")
        self.draw = torch.Generator().manual_seed(7)

    def read(self, cache: PolicyCache, tokens: int, **how: int) -> PolicyCache:
        """Let every sequence of a cache bring so many tokens."""
        rows = cache.sequences or 1
        cache.begin(torch.ones(rows, tokens, dtype=torch.bool), **how)
        for layer in range(SHAPE.layers):
            cache.attend(layer, *self._fresh(rows, tokens), 0.4)
        return cache

    def _fresh(self, rows: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        def made(*lead: int) -> Tensor:
            return torch.randn(rows, SHAPE.kv_heads, *lead, generator=self.draw)

        key, value = SHAPE.key_dim, SHAPE.value_dim
        return made(SHAPE.group, tokens, key), made(tokens, key), made(tokens, value)

    def prompt(self, tokens: int, budget: int | None = None) -> PolicyCache:
        """A cache of its own for one prompt."""
        asked = None if budget is None else Budget(budget)
        return self.read(self.first.another(asked), tokens)

    def poisoned(self) -> int:
        """Pages of the pool that hold nothing but poison."""
        return int((self.memory[:-1] == POISON).all(1).sum())

    def check(self, *caches: PolicyCache) -> None:
        """Every page is somebody's, once, or free and poisoned."""
        held = torch.cat([each.batch.pages() for each in caches if each.batch is not None])
        self.pool.check(held)
        assert self.pool.used == len(held)
        assert self.poisoned() == PAGES - len(held)


def tokens(cache: PolicyCache) -> list[int]:
    """What each sequence holds over all layers and heads."""
    return cache.memory().tokens.sum((0, 2)).tolist()


def pages(cache: PolicyCache) -> list[int]:
    return cache.batch.pages_used().tolist()


def needed(cache: PolicyCache) -> list[int]:
    """Pages that the tokens of each sequence need, by head."""
    return (-(-cache.memory().tokens // PAGE)).sum((0, 2)).tolist()


def test_another_shares_the_pool_and_nothing_that_is_held() -> None:
    room = PageReservation()
    room.read(room.first, 40)
    before = tokens(room.first), pages(room.first), room.first.columns
    other = room.first.another()
    assert other.sequences is None
    assert other.columns == 0
    assert tokens(other) == []
    room.read(other, 20)
    assert other.batch.pool is room.first.batch.pool is room.pool
    assert (tokens(room.first), pages(room.first), room.first.columns) == before
    room.check(room.first, other)


def test_another_has_a_budget_of_its_own_and_its_own_another_has_not() -> None:
    room = PageReservation()
    larger = room.prompt(40, 24)
    own = room.read(larger.another(), 40)
    assert (tokens(larger), tokens(own)) == ([24 * HEADS], [BUDGET * HEADS])
    assert (pages(larger), pages(own)) == ([24 * HEADS // PAGE], [BUDGET * HEADS // PAGE])
    with pytest.raises(ValueError, match="a budget of 3 tokens is smaller than the 4 that"):
        larger.another(Budget(3))
    with pytest.raises(ValueError, match="keeps every token, so a budget of 24 has no effect"):
        PageReservation("raw").first.another(Budget(24))


def test_a_joined_sequence_brings_its_pages_and_its_budget() -> None:
    room = PageReservation()
    mine, other, third = room.prompt(40), room.prompt(36, 24), room.prompt(8)
    wanted = tokens(mine) + tokens(other) + tokens(third)
    assert wanted == [BUDGET * HEADS, 24 * HEADS, 8 * HEADS]
    used, bytes_before = room.pool.used, room.memory.clone()
    mine.join(other)
    mine.join(third)
    assert room.pool.used == used
    assert torch.equal(room.memory, bytes_before)  # no page moves
    assert tokens(mine) == wanted
    assert pages(mine) == needed(mine) == [n // PAGE for n in wanted]
    assert mine.batch.seen.tolist() == [40, 36, 8]
    assert mine.sequences == 3
    assert (other.sequences, third.sequences) == (None, None)
    room.check(mine, other, third)
    for _ in range(8):
        room.read(mine, 1)
    assert mine.compress() == [0, 1, 2]
    assert tokens(mine) == [BUDGET * HEADS, 24 * HEADS, BUDGET * HEADS]
    room.check(mine)
    room.read(other, 16)  # which was left empty, and reads its next prompt under its own budget
    assert tokens(other) == [16 * HEADS]
    room.check(mine, other)


def test_what_cannot_be_joined_is_refused_and_stays_as_it_was() -> None:
    room = PageReservation()
    mine, begun = room.prompt(40), room.read(room.first.another(), 12, prompt=True, remaining=1)
    elsewhere = PageReservation().prompt(40)
    longer = PolicyCache(parse(SHORT), SHAPE, page_tokens=8, backend="torch")
    room.read(longer, 40)
    held = tokens(mine), tokens(begun), pages(mine)
    with pytest.raises(ValueError, match="an empty cache cannot be joined"):
        mine.join(room.first)
    with pytest.raises(ValueError, match="an empty cache cannot be joined"):
        room.first.join(mine)
    with pytest.raises(ValueError, match="with unfinished prompts cannot be joined"):
        mine.join(begun)
    with pytest.raises(ValueError, match="pool"):
        mine.join(elsewhere)
    with pytest.raises(ValueError, match="have different page layouts"):
        mine.join(longer)
    assert (tokens(mine), tokens(begun), pages(mine)) == held
    assert elsewhere.sequences == 1
    for _ in range(PAGE):
        room.read(mine, 1)
    assert mine.compress()
    assert tokens(mine) == [BUDGET * HEADS]
    room.check(mine, begun)


@pytest.mark.parametrize(("text", "window"), [(SHORT, 0), (f"{SHORT}+k8v8:window=8", 8)])
def test_compressing_gives_back_all_pages_beyond_the_budget(text: str, window: int) -> None:
    room = PageReservation(text)
    cache = room.prompt(40 + window)
    for _ in range(16):
        room.read(cache, 1)
    (full,) = tokens(cache)
    assert full == (BUDGET + 16 + window) * HEADS
    used = room.pool.used
    assert cache.compress()
    assert tokens(cache) == [(BUDGET + window) * HEADS]
    assert used - room.pool.used == 16 * HEADS // PAGE
    room.check(cache)
    assert cache.compress() == []  # there is nothing to let go of
    assert tokens(cache) == [(BUDGET + window) * HEADS]
    room.read(cache, 1)
    room.check(cache)


def test_no_more_sequences_are_compressed_than_free_the_pages_that_are_short() -> None:
    room = PageReservation()
    cache, other, third = room.prompt(40), room.prompt(36, 24), room.prompt(28)
    cache.join(other)
    cache.join(third)
    for _ in range(8):
        room.read(cache, 1)
    before = tokens(cache)
    assert before == [(BUDGET + 8) * HEADS, (24 + 8) * HEADS, (BUDGET + 8) * HEADS]
    each = 8 * HEADS // PAGE  # pages that one of them has beyond its budget
    used = room.pool.used
    assert cache.compress(pages=3 * each + 1) == []  # all together have fewer
    assert (tokens(cache), room.pool.used) == (before, used)
    assert cache.compress(pages=each) == [0]
    assert used - room.pool.used == each
    assert cache.compress(pages=each + 1) == [1, 2]
    assert tokens(cache) == [BUDGET * HEADS, 24 * HEADS, BUDGET * HEADS]
    assert cache.compress() == []
    room.check(cache)


@pytest.mark.parametrize("text", [SHORT, f"{SHORT},layers=even", f"{SHORT}+k8v8:window=8"])
def test_how_many_sequences_are_planned_at_once_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    found = []
    for places in (1 << 20, 1):
        monkeypatch.setattr("kv_runtime.retain.replan._TOGETHER", places)
        room = PageReservation(text)
        cache = room.prompt(40)
        for tokens_seen in (36, 28):
            cache.join(room.prompt(tokens_seen))
        for _ in range(12):
            room.read(cache, 1)
        before = sum(tokens(cache))
        assert cache.compress() == [0, 1, 2]
        assert sum(tokens(cache)) < before
        room.check(cache)
        (store,) = cache.batch.stores
        held = store.read(store.table_rows(), frozenset({"keys", "values"}))
        found.append((held.held, held.position, held.score, held.key, held.value))
    for together, alone in zip(*found, strict=True):
        assert torch.equal(together, alone)


@pytest.mark.parametrize("text", [COMPRESS, "snapkv:budget=12,window=4", "k8v8:window=8", "k8v4"])
def test_who_never_plans_for_pages_changes_nothing(text: str) -> None:
    room = PageReservation(text)
    assert not room.first.compress()
    cache = room.prompt(40)
    room.read(cache, 1)
    held, memory = tokens(cache), room.memory.clone()
    assert not cache.compress()
    assert tokens(cache) == held
    assert torch.equal(room.memory, memory)
    room.check(cache)


@pytest.mark.parametrize("text", [SHORT, "leankv:window=4", "k8v8:window=8"])
def test_release_gives_back_everything_and_nothing_of_others(text: str) -> None:
    room = PageReservation(text)
    mine, other = room.prompt(40), room.prompt(24)
    held, memory = pages(other), room.memory.clone()
    room.check(mine, other)
    mine.release()
    assert (room.pool.used, mine.sequences, mine.columns) == (sum(held), None, 0)
    kept = other.batch.pages()
    assert torch.equal(room.memory[kept], memory[kept])
    room.check(mine, other)
    mine.release()
    room.first.release()
    assert room.pool.used == sum(held)
    room.read(mine, 40)  # and it may begin anew
    room.check(mine, other)
    mine.release()
    other.release()
    assert (room.pool.used, room.poisoned()) == (0, PAGES)
