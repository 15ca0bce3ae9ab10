"""A step over individually encoded tokens never synchronizes, for any number of table rows."""

import math

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kv_paging import PagePool, Tiers, fit
from kv_policy import DROP, NOBODY, RawCodec, TokenFormat

WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "item"}
BOTH = frozenset({"keys", "values"})


class Reads(TorchFunctionMode):
    """Raises for reads of memory that bypass the dispatcher, such as tolist on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in {"tolist", "numpy", "cpu", "__array__"}:
            raise AssertionError(f"{func.__name__} makes the host wait")
        return func(*args, **(kwargs or {}))


class Watch(TorchDispatchMode):
    """Counts operations, and raises for reads from the device and indexing by masks."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.reads = Reads()

    def __enter__(self):
        self.reads.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.reads.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        places = args[1] if name.startswith("index") and len(args) > 1 else ()
        by_mask = isinstance(places, (list, tuple)) and any(
            isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in places
        )
        sized = (kwargs or {}).get("output_size") is not None
        if name in WAITS or by_mask or (name == "repeat_interleave" and not sized):
            raise AssertionError(f"{name} makes the host wait")
        self.count += 1
        return func(*args, **(kwargs or {}))


def formats(tiers: int) -> list[TokenFormat]:
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    return [TokenFormat(RawCodec(4, kind), RawCodec(3, kind)) for kind in kinds[:tiers]]


def operations(tiers: int, shape: tuple[int, int, int], fixed: bool) -> list[int]:
    """Return the operations of steps, scores and reads, over nonempty tiers."""
    random = torch.Generator().manual_seed(1)
    layouts = fit(formats(tiers), 5, True, True)
    table_rows = math.prod(shape)
    pool = PagePool(layouts[0].nbytes, 40 * table_rows if fixed else 0, grows=not fixed)
    cache = Tiers(pool, layouts, *shape)

    def step() -> None:
        weakest, place = cache.weakest()
        draw = torch.rand(3, table_rows, generator=random)
        candidate = (draw[0] * (tiers + 1)).to(torch.uint8)
        victim = (draw[1] * (tiers + 1)).to(torch.uint8)
        target = victim + 1
        cache.step(
            candidate.where(candidate < tiers, DROP).to(torch.uint8),
            victim.where(victim < tiers, NOBODY).to(torch.uint8),
            target.where(target < tiers, DROP).to(torch.uint8),
            place,
            torch.rand(table_rows, 4, generator=random),
            torch.rand(table_rows, 3, generator=random),
            draw[2],
            torch.arange(table_rows),
        )
        assert weakest.shape == place.shape == (tiers, table_rows)

    for _ in range(9):
        step()
    if not fixed:
        pool.reserve(pool.free + 4 * tiers * table_rows)
    step()  # the pool reserves pages for some steps here, and reads the number of free ones
    for store in cache.stores:
        store.widen(40)  # a step sometimes widens a table, which needs further operations
    counts = []
    for _ in range(4):
        with Watch() as watch:
            step()
            for store in cache.stores:
                read = store.read_layer(0, BOTH)
                assert read.score is not None
                store.set_layer_scores(0, read.score * 2)
            cache.counts()
            cache.views(0)
        counts.append(watch.count)
    cache.check()
    return counts


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("tiers", [1, 2, 3])
def test_a_step_does_not_wait_and_takes_no_more_operations_for_more_table_rows(
    tiers: int, fixed: bool
) -> None:
    few = operations(tiers, (1, 1, 1), fixed)
    many = operations(tiers, (4, 8, 3), fixed)
    assert max(many) <= max(few)


def test_what_waits_is_noticed() -> None:
    layouts = fit(formats(2), 5, True, True)
    cache = Tiers(PagePool(layouts[0].nbytes), layouts, 1, 1, 1)
    with Watch(), pytest.raises(AssertionError, match="makes the host wait"):
        _ = cache.pages_used
    with Watch(), pytest.raises(AssertionError, match="tolist makes the host wait"):
        cache.pool.ensure(1)
    with Watch(), pytest.raises(AssertionError, match="index makes the host wait"):
        _ = torch.ones(3)[torch.ones(3, dtype=torch.bool)]
