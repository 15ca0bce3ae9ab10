"""Random operations on a tier whose bounds of keys are kept, or codes of them."""

from dataclasses import dataclass

import torch

from key_code_reference import check_codes
from kv_paging import PagePool, Tiers
from kv_paging.bounding import bounds_in
from kv_policy import DROP, NOBODY, PageLayout, RawCodec, TokenFormat

RAW = TokenFormat(RawCodec(4, torch.float32), RawCodec(2, torch.float32))
LAYOUT = PageLayout.sized(RAW, 4, scores=True, positions=True)
IN_PAGES = PageLayout.sized(RAW, 4, scores=True, positions=True, bounds=True)
CODED = PageLayout.sized(RAW, 4, scores=True, positions=True, bounds=True, coded=True)
HEADS = 2


@dataclass
class World:
    """Tiers of one tier, whose bounds are kept."""

    seed: int
    tiers: Tiers
    coded: bool = False

    @classmethod
    def of(
        cls,
        seed: int,
        kernels: str | None = None,
        layout: PageLayout = LAYOUT,
        coded: bool | None = None,
    ) -> "World":
        pool = PagePool(layout.nbytes, 0, grows=True, poison=True, kernels=kernels)
        tiers = Tiers(pool, [layout], 2, 2, HEADS)
        coded = layout.coded if coded is None else coded
        tiers.stores[0].keep_bounds(coded)
        world = cls(seed, tiers, coded)
        torch.manual_seed(seed)
        return world

    def append(self, length: int = 11) -> None:
        rows = self.tiers.table_rows()
        shape = len(rows), length
        keep = torch.rand(shape) < 0.7
        self.tiers.append(
            0, rows, torch.randn(*shape, 4), torch.randn(*shape, 2), keep,
            torch.rand(shape), torch.arange(length).expand(shape),
        )  # fmt: skip

    def step(self, victim: int, until: int = 0) -> None:
        rows = len(self.tiers.table_rows())
        _, place = self.tiers.weakest()
        which = torch.zeros(rows, dtype=torch.uint8)
        self.tiers.step(
            which, which + victim, which + DROP, place,
            torch.randn(rows, 4), torch.randn(rows, 2), torch.rand(rows), torch.full((rows,), 99),
        )  # fmt: skip

    def grow(self) -> None:
        self.step(NOBODY)

    def evict_one(self) -> None:
        self.step(0)

    def compact(self) -> None:
        store = self.tiers.stores[0]
        rows = store.table_rows()[torch.rand(len(store.table_rows())) < 0.5]
        store.compact(rows, torch.rand(len(rows), store.longest) < 0.6)

    def remove(self) -> None:
        store = self.tiers.stores[0]
        some = store.length.flatten() > 2
        store.remove(store.table_rows(), torch.where(some, 1, -1))

    def replace(self) -> None:
        store = self.tiers.stores[0]
        rows = store.table_rows()
        slot = torch.where(store.length.flatten() > 2, 2, -1)
        place = torch.full_like(slot, 7)
        given = torch.randn(len(rows), 4) * 9, torch.randn(len(rows), 2), torch.rand(len(rows))
        store.replace(rows, slot, *given, place)

    def select(self) -> None:
        count = self.tiers.stores[0].length.shape[1]
        self.tiers.select(torch.randint(0, count, (3,)))

    def truncate(self) -> None:
        self.tiers.truncate(torch.randint(0, 12, (self.tiers.stores[0].length.shape[1],)))

    def clear(self) -> None:
        self.tiers.clear(torch.tensor([0]))

    def trim(self) -> None:
        self.tiers.trim()

    @property
    def layout(self) -> PageLayout:
        return self.tiers.stores[0].layout

    def another(self) -> Tiers:
        other = Tiers(self.tiers.pool, [self.layout], 2, 1, HEADS)
        other.stores[0].keep_bounds(self.coded)
        return other

    def join(self) -> None:
        other = self.another()
        World(0, other).append(9)
        self.tiers.join(other)

    def branch(self) -> None:
        """Let another sequence continue the first one, and join it."""
        other = self.another()
        self.tiers.branch(0, other, share=True)
        self.tiers.join(other)

    def update(self) -> None:
        store = self.tiers.stores[0]
        assert store.bounds is not None
        store.update_bounds()
        full = store.length.flatten().long() // self.layout.tokens
        assert store.bounds.count.tolist() == full.tolist()
        if store.bounds.in_pages and full.sum():
            in_pool = bounds_in(store.pool.padded, self.layout)
            assert store.bounds.both.data_ptr() == in_pool.data_ptr()
        self.check()

    def rewrite(self) -> None:
        """Merge something into every third token, as a selector may, so that its key is longer."""
        store = self.tiers.stores[0]
        rows = store.table_rows()
        slot = torch.arange(store.longest).expand(len(rows), -1)
        some = (slot < store.length.flatten()[:, None]) & (slot % 3 == 1)
        many = int(some.sum())
        store.rewrite(rows, some, 5 * torch.randn(many, 4), torch.randn(many, 2))

    def check(self) -> None:
        """Compare each bound with the keys of its page, and how near it is to them."""
        store = self.tiers.stores[0]
        assert store.bounds is not None
        found = store.read(store.table_rows(), frozenset({"keys"}))
        assert found.key is not None
        for row, count in enumerate(store.bounds.count.tolist()):
            for at in range(count):
                keys = found.key[row, at * 4 : at * 4 + 4]
                if store.bounds.in_pages:
                    page = store.page_table.lookup(torch.tensor([row]), torch.tensor([at]))
                    both = bounds_in(store.pool.padded, self.layout)[int(page)]
                else:
                    both = store.bounds.both[row, at]
                if self.coded:
                    check_codes(both, keys)
                    continue
                high, low = both.float().split(4)
                for bound, true in ((high, keys.amax(0)), (-low, -keys.amin(0))):
                    assert (bound >= true).all()
                    assert (bound - true <= true.abs() / 128).all()
