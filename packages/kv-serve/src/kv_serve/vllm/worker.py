"""What a worker holds: the pages of its requests, in the memory that vLLM allocated."""

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger

from kv_paging import PagePool
from kv_policy import KVPolicy
from kv_runtime import Account, Held, Meter, Part, Tally, TieredCache, held_by, page_kernels
from kv_serve.vllm.attach import is_heard
from kv_serve.vllm.messages import Orders, Reports, Told, Turn
from kv_serve.vllm.names import POISON
from kv_serve.vllm.rows import Rows
from kv_serve.vllm.shape import attention_layers, backend_of, model_shape

logger = init_logger("vllm.kv_serve")


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
    lost: list[slice | Tensor] = field(
        default_factory=list
    )  # rows of the step whose requests have failed
    serials: dict[str, int] = field(default_factory=dict)  # of the requests that are held
    failed: dict[str, int] = field(default_factory=dict)  # who failed and is not gone: its serial
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
            careful=True,
        )
        return cls(empty, layer.impl.scale, pool, meter)

    def begin(self, orders: Orders) -> None:
        """Begin a step: let go of requests that are gone, and compress if blocks are short."""
        self.orders, self.parts, self.lost = orders, [], []
        again = (turn.request for turn in orders.turns.values() if turn.computed == 0)
        self._drop({*orders.gone, *again})
        self.serials |= {turn.request: turn.serial for turn in orders.turns.values()}
        self.answered, self.compressed = orders.short, set()
        if orders.short and self.generating is not None and self.generating.batch is not None:
            room = self.generating.batch.a_page_each
            try:
                self.compressed = {self.names[i] for i in self.generating.compress(room)}
            except Exception as error:
                self._fail(self.generating, error)
            self._expel()

    def attend(
        self,
        layer: int,
        rows: Rows,
        query: Float[Tensor, "m Q D"],
        key: Float[Tensor, "m H D"],
        value: Float[Tensor, "m H Dv"],
        output: Float[Tensor, "m Q Dv"],
    ) -> None:
        """Let the step's tokens attend in one layer, and store them; layers come in order.

        What fails of one request, in a policy say, ends that request, and its rows become zero.
        """
        if layer == 0:
            self._open(rows)
        whole = self.parts
        for part in whole:
            try:
                part.attend(layer, query, key, value, self.scale, output)
            except Exception as error:
                self._lose(part, error)
        if layer == self.empty.shape.layers - 1:
            self._close()
        for row in self.lost:
            output[row] = 0

    def failures(self) -> list[int]:
        """Give the serials of requests that failed, until they are gone."""
        return [*self.failed.values()]

    def end(self) -> Reports:
        """End a step: tell how many pages requests hold."""
        orders, self.orders = self.orders, None
        assert orders is not None, "a step that ends has begun"
        names = {turn.request for turn in orders.turns.values()}
        names |= self.compressed  # which need not be part of the step
        held = self.held()
        told = {name: Told(x.pages, x.computed) for name, x in held.items() if name in names}
        measured = None
        if self.meter is not None:
            read = any(turn.reads and not turn.more for turn in orders.turns.values())
            by_serial = {self.serials[name]: each for name, each in held.items()}
            measured = self.meter.step(self.pool, by_serial, read=read)
        return Reports(orders.step, told, self.answered, measured)

    def held(self) -> dict[str, Held]:
        """Give what every request holds that holds something."""
        found: dict[str, Held] = {}
        caches = [([name], cache) for name, cache in self.reading.items()]
        if self.generating is not None:
            caches.append((self.names, self.generating))
        for names, cache in caches:
            if cache.batch is not None:
                found |= zip(names, held_by(cache.batch, kept=self.meter is not None), strict=True)
        return found

    def _open(self, rows: Rows) -> None:
        assert self.orders is not None, "a forward pass follows the beginning of a step"
        found: dict[str, int] = {}
        for i, first in enumerate(rows.first):
            turn, begin, end = self.orders.turns[first], rows.start[i], rows.start[i + 1]
            if turn.request in self.failed:
                self.lost.append(slice(begin, end))
            elif turn.reads or turn.refused:
                self._read(turn, begin, end)
            else:
                found[turn.request] = begin
        if found:
            assert self.generating is not None, "who generates has been read"
            row = torch.tensor([[found.get(name, -1)] for name in self.names])
            part = Part.of(self.generating, row, self.pool.device)
            self._begin(part, prompt=False, more=False)

    def _read(self, turn: Turn, begin: int, end: int) -> None:
        """Begin the pass of a prompt, or of a part of one."""
        try:
            if turn.refused is not None:
                raise ValueError(turn.refused)
            cache = self._prompt(turn)
        except Exception as error:
            self._note(turn.request, error)
            self.lost.append(slice(begin, end))
            self._let_go({turn.request})
            return
        part = Part.of(cache, torch.arange(begin, end)[None], self.pool.device)
        self._begin(part, prompt=True, more=turn.more)

    def _begin(self, part: Part, *, prompt: bool, more: bool) -> None:
        self.parts = [*self.parts, part]
        try:
            part.begin(prompt=prompt, more=more)
        except Exception as error:
            self._lose(part, error)

    def _close(self) -> None:
        """Let requests that have been read generate, together with the others."""
        assert self.orders is not None
        self._expel()
        for turn in self.orders.turns.values():
            if turn.reads and not turn.more and turn.request in self.reading:
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

    def _lose(self, part: Part, error: Exception) -> None:
        """Let the requests of a part fail, in whatever layer."""
        self.parts = [each for each in self.parts if each is not part]
        self.lost.append(part.target)
        self._fail(part.cache, error)

    def _fail(self, cache: TieredCache, error: Exception) -> None:
        """Let the requests of a cache fail, with all that is held for them."""
        if isinstance(error, torch.AcceleratorError):
            raise error  # nothing more runs on this device
        names = self.names if cache is self.generating else []
        for name in [*names, *(name for name, each in self.reading.items() if each is cache)]:
            self._note(name, error)
        cache.release()
        if cache is self.generating:
            self.generating, self.names = None, []
        self.reading = {name: each for name, each in self.reading.items() if each is not cache}

    def _expel(self) -> None:
        """Let requests fail that a policy failed about, of those that generate."""
        errors = {} if self.generating is None else self.generating.failures()
        for i, error in errors.items():
            self._note(self.names[i], error)
        if errors:
            self._let_go({self.names[i] for i in errors})

    def _note(self, name: str, error: Exception) -> None:
        logger.error("the request %s fails: %s", name, error, exc_info=error)
        self.failed[name] = self.serials[name]

    def _drop(self, gone: set[str]) -> None:
        for name in gone:
            self.failed.pop(name, None)
            self.serials.pop(name, None)
        for name in gone & self.reading.keys():
            self.reading.pop(name).release()
        self._let_go(gone)

    def _let_go(self, gone: Collection[str]) -> None:
        """Let go of requests that generate."""
        kept = [i for i, name in enumerate(self.names) if name not in gone]
        if self.generating is None or len(kept) == len(self.names):
            return
        self.names = [self.names[i] for i in kept]
        if kept:
            self.generating.select(torch.tensor(kept))
        else:
            self.generating.release()
            self.generating = None
