"""What a worker holds: the pages of its requests, in the memory that vLLM allocated."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor
from vllm.config import VllmConfig

from kv_paging import PagePool
from kv_policy import KVPolicy
from kv_serve.backends import page_kernels
from kv_serve.batch import Batch
from kv_serve.tally import Tally
from kv_serve.tiered import TieredCache
from kv_serve.vllm.account import Account
from kv_serve.vllm.attach import is_heard
from kv_serve.vllm.measure import Meter
from kv_serve.vllm.messages import Orders, Reports, Told, Turn
from kv_serve.vllm.parts import Part
from kv_serve.vllm.plugin import POISON
from kv_serve.vllm.rows import Rows
from kv_serve.vllm.shape import attention_layers, backend_of, model_shape


@dataclass(slots=True)
class Worker:
    """The requests of a worker: those that are being read, and those that generate, together.

    vLLM runs whole steps in inference mode, so what outlives one need not be made outside it.
    """

    empty: TieredCache  # over the pool of all
    scale: float
    pool: PagePool
    meter: Meter | None = None  # None: nobody hears of it
    reading: dict[str, TieredCache] = field(default_factory=dict)
    generating: TieredCache | None = None
    names: list[str] = field(default_factory=list)  # of the sequences that generate
    orders: Orders | None = None
    parts: list[Part] = field(default_factory=list)  # of the step
    compressed: set[str] = field(default_factory=set)  # when the step began
    answered: bool = False

    @classmethod
    def over(
        cls, config: VllmConfig, policy: KVPolicy, account: Account, caches: dict[str, Tensor]
    ) -> "Worker":
        """Lay the pages of the account over the memory of all layers, which is one allocation."""
        layer = attention_layers(config)[0]
        shape, backend = model_shape(config, layer), backend_of(config)
        found = [cache.untyped_storage() for cache in caches.values()]
        (_,) = {each.data_ptr() for each in found}  # vLLM allocates all layers' memory at once
        storage = found[0]
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        size = account.page_bytes
        data = flat[: len(flat) // size * size].view(-1, size)
        poison = bool(config.additional_config.get(POISON))
        pool = PagePool.over(data, poison=poison, kernels=page_kernels(backend))
        meter = Meter(shape, Tally()) if is_heard(config) else None
        empty = TieredCache(
            policy,
            shape,
            page_tokens=account.block_tokens,
            device=storage.device,
            backend=backend,
            pool=pool,
            tally=None if meter is None else meter.tally,
        )
        return cls(empty, layer.impl.scale, pool, meter)

    def begin(self, orders: Orders) -> None:
        """Begin a step: let go of requests that are gone, and compress if blocks are short."""
        self.orders, self.parts = orders, []
        again = (turn.request for turn in orders.turns.values() if turn.computed == 0)
        self._drop({*orders.gone, *again})
        self.answered, self.compressed = orders.short, set()
        if orders.short and self.generating is not None and self.generating.batch is not None:
            room = self.generating.batch.a_page_each
            self.compressed = {self.names[i] for i in self.generating.compress(room)}

    def attend(
        self,
        layer: int,
        rows: Rows,
        query: Float[Tensor, "m Q D"],
        key: Float[Tensor, "m H D"],
        value: Float[Tensor, "m H Dv"],
        output: Float[Tensor, "m Q Dv"],
    ) -> None:
        """Let the step's tokens attend in one layer, and store them; layers come in order."""
        if layer == 0:
            self._open(rows)
        for part in self.parts:
            part.attend(layer, query, key, value, self.scale, output)
        if layer == self.empty.shape.layers - 1:
            self._close()

    def end(self) -> Reports:
        """End a step: tell how many pages requests hold."""
        orders, self.orders = self.orders, None
        assert orders is not None, "a step that ends has begun"
        names = {turn.request for turn in orders.turns.values()}
        names |= self.compressed  # which need not be part of the step
        told = {name: each for name, each in self._told() if name in names}
        batches = [batch for _, batch in self._held()]
        measured = None if self.meter is None else self.meter.step(self.pool, batches)
        return Reports(orders.step, told, self.answered, measured)

    def _open(self, rows: Rows) -> None:
        assert self.orders is not None, "a forward pass follows the beginning of a step"
        found: dict[str, int] = {}
        device = self.pool.device
        for i, first in enumerate(rows.first):
            turn, begin, end = self.orders.turns[first], rows.start[i], rows.start[i + 1]
            if turn.reads:
                part = Part.of(self._prompt(turn), torch.arange(begin, end)[None], device)
                part.begin(prompt=True, more=turn.more)
                self.parts.append(part)
            else:
                found[turn.request] = begin
        if found:
            assert self.generating is not None, "who generates has been read"
            row = torch.tensor([[found.get(name, -1)] for name in self.names])
            part = Part.of(self.generating, row, device)
            part.begin(prompt=False, more=False)
            self.parts.append(part)

    def _close(self) -> None:
        """Let requests that have been read generate, together with the others."""
        assert self.orders is not None
        for turn in self.orders.turns.values():
            if turn.reads and not turn.more:
                cache = self.reading.pop(turn.request)
                self.names.append(turn.request)
                if self.generating is None:
                    self.generating = cache
                else:
                    self.generating.join(cache)

    def _prompt(self, turn: Turn) -> TieredCache:
        if turn.computed == 0:
            self.reading[turn.request] = self.empty.another(turn.budget)
        return self.reading[turn.request]

    def _drop(self, gone: set[str]) -> None:
        for name in gone & self.reading.keys():
            self.reading.pop(name).release()
        kept = [i for i, name in enumerate(self.names) if name not in gone]
        if self.generating is None or len(kept) == len(self.names):
            return
        self.names = [self.names[i] for i in kept]
        if kept:
            self.generating.select(torch.tensor(kept))
        else:
            self.generating.release()
            self.generating = None

    def _told(self) -> Iterable[tuple[str, Told]]:
        """Pages and tokens of every request that holds some."""
        for names, batch in self._held():
            both = torch.stack((batch.pages_used(), batch.seen), 1).tolist()
            yield from ((name, Told(*each)) for name, each in zip(names, both, strict=True))

    def _held(self) -> Iterable[tuple[list[str], Batch]]:
        """The requests that hold something, with the batches that hold it."""
        caches = [([name], cache) for name, cache in self.reading.items()]
        if self.generating is not None:
            caches.append((self.names, self.generating))
        for names, cache in caches:
            if cache.batch is not None:
                yield names, cache.batch
