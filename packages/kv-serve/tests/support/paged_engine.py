"""A simulated scheduler and worker: both sides of our connector and vLLM's real block pool.

Needs vLLM, so only tests in a folder named vllm can import it.
"""

import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import accumulate
from types import SimpleNamespace
from typing import Final

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="vLLM is not installed; `nox -s vllm` has one")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kv_paging import PagePool
from kv_policy import CacheShape, KVPolicy
from kv_runtime import Account, Bases, Layout, PolicyCache, RequestBatch, RequestRows, RequestStep
from kv_runtime.batch import Batch
from kv_serve.vllm.block_source import SharedPool
from kv_serve.vllm.memory import Memory
from kv_serve.vllm.messages import StepMetadata, WorkerReport
from kv_serve.vllm.scheduler_state import SchedulerState
from kv_serve.vllm.spec import PagedManager, PagedSpec
from kv_serve.vllm.worker import Worker

POISON: Final = 0xFF
FOREIGN: Final = 0xAB  # bytes of other layers
SCALE: Final = 0.4


def account_of(policy: KVPolicy, shape: CacheShape, block_tokens: int = 16) -> Account:
    """Return the account that sizes vLLM's blocks."""
    bases = None if policy.basis is None else Bases.of(policy.basis, shape, torch.device("cpu"))
    layout = Layout.of(policy, shape, bases, block_tokens, pooled=True)
    return Account.of(layout, block_tokens)


def manager_of(
    account: Account, blocks: int, caching: bool = False, kept: bool = False
) -> PagedManager:
    """Create our manager over a pool of `blocks` blocks, and one that vLLM reserves."""
    spec = PagedSpec(
        block_size=account.block_tokens,
        num_kv_heads=1,
        head_size=1,
        dtype=torch.uint8,
        account=account,
        kept=kept,
    )
    pool = BlockPool(blocks + 1, caching, account.block_tokens)
    return PagedManager(
        spec,
        block_pool=pool,
        enable_caching=caching,
        kv_cache_group_id=0,
        scheduler_block_size=account.block_tokens,
    )


class Failure(Exception):
    """Raised by a test policy for the tokens of one request."""


@dataclass
class Asked:
    """A request, with a separate reference cache of the same tokens."""

    request_id: str
    prompt: int
    draw: torch.Generator
    sampling_params: SimpleNamespace
    num_tokens: int = 0  # prompt and generated tokens
    max_tokens: int = 100
    computed: int = 0
    told: bool = False  # the workers know it
    broken: bool = False  # the policy fails for it, in the reference cache too
    alone: PolicyCache | None = None
    stored: int = 0  # tokens in the worker's cache: all but drafts of the last step
    # Drafts of the last step that were right, which the reference cache reads with the next step.
    right: list[list[tuple[Tensor, Tensor, Tensor]]] = field(default_factory=list)

    def tokens(self, count: int, shape: CacheShape) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return queries, keys and values of all layers, by token."""

        def made(heads: int, dim: int) -> Tensor:
            return torch.randn(count, heads, dim, generator=self.draw).to(shape.dtype)

        query, key, value = shape.kv_heads * shape.group, shape.key_dim, shape.value_dim
        return [
            (made(query, key), made(shape.kv_heads, key), made(shape.kv_heads, value))
            for _ in range(shape.layers)
        ]


@dataclass
class Engine:
    """Schedules requests like vLLM: first come, first served; the newest is preempted."""

    policy: KVPolicy
    shape: CacheShape
    blocks: int
    block_tokens: int = 16
    late: bool = False  # reports arrive after the next step is scheduled
    fixed: int = 0  # requests that decode in memory of fixed addresses; 0: it changes its place
    drafts: int = 0  # the most drafts of a request in a step
    accepted: int = 0
    rejected: int = 0
    seed: int = 0
    running: list[Asked] = field(default_factory=list)
    waiting: list[Asked] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    preemptions: int = 0
    shorts: int = 0
    compressed: int = 0  # failed requests, per step
    failed: list[str] = field(default_factory=list)  # requests that ended with an error
    steps: int = 0
    others: int = 0  # blocks that layers kept by vLLM use at most; 0: there are none
    held_by_others: list[KVCacheBlock] = field(default_factory=list)
    # Pages and tokens of requests in the last step, of which the next one reports.
    unreported: dict[str, tuple[int, int]] = field(default_factory=dict)
    moves: int = 0  # steps in which blocks were returned that still held pages

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.account = account_of(self.policy, self.shape, self.block_tokens)
        shared, each = bool(self.others), self.account.block_pages
        self.blocks += self.others
        self.manager = manager_of(self.account, self.blocks + shared, kept=shared)
        self.manager.lead(())
        self.state = SchedulerState(self.policy, self.manager, 10**6, drafts=self.drafts)
        self.manager.ahead += self.drafts
        # No spare pages, plus a scratch page; of a shared pool all blocks are there, with the null
        # block and the last, each with a part in the region of every layer.
        pages = (self.blocks + 2) * each if shared else self.blocks * each + 1
        shape = (pages, self.account.page_bytes)
        data = torch.full(shape, POISON, dtype=torch.uint8)
        parts = each // self.shape.layers
        self.memory = Memory(data, self.account, shared, self.blocks + 2, parts)
        pool = PagePool.over(data, free=not shared, poison=True)
        kept = {"page_tokens": self.block_tokens, "backend": "torch", "pool": pool}
        empty = PolicyCache(self.policy, self.shape, careful=True, **kept)
        self.worker = Worker(RequestBatch(empty, SCALE, lambda *_: None), pool, self.memory)
        if self.fixed:
            self.worker.requests.fix(self.fixed, 1000)
        self.pending: WorkerReport | None = None

    def ask(self, name: str, prompt: int, budget: object = None) -> Asked:
        """Add a request to the waiting queue."""
        seed = torch.Generator().manual_seed(self.draw.getrandbits(32))
        extra = None if budget is None else {"kv_budget": budget}
        asked = Asked(name, prompt, seed, SimpleNamespace(extra_args=extra), prompt)
        self.waiting.append(asked)
        self.state.welcome(asked)
        return asked

    def finish(self, asked: Asked) -> None:
        """Remove a request that is finished or aborted."""
        for queue in (self.running, self.waiting):
            if asked in queue:
                queue.remove(asked)
        self._free(asked)
        self.state.finished(asked.request_id)
        self.finished.append(asked.request_id)

    def step(self, left_out: float = 0.0, chunk: int = 64) -> StepMetadata:
        """Schedule, run the worker and process its reports."""
        scheduled = self._schedule(left_out, chunk)
        self._let_others()
        orders = self.state.metadata(scheduled)
        if self.pending is not None:
            self._let_fail()
            self.state.note(self.pending)
            self.pending = None
            self.check_blocks()
        reports = self._work(orders)
        if self.late:
            self.pending = reports
        else:
            self._let_fail()
            self.state.note(reports)
        self.check_blocks()
        self.steps += 1
        return orders

    def _let_fail(self) -> None:
        for name in self.state.failed(self.worker.failures()):
            asked = self._named(name)
            assert asked.broken
            self.finish(asked)
            self.failed.append(name)

    def _schedule(self, left_out: float, chunk: int) -> SimpleNamespace:
        scheduled: dict[str, int] = {}
        self.drafted: dict[str, int] = {}  # in the step, by request
        preempted = False
        for asked in list(self.running):
            if asked not in self.running or self.draw.random() < left_out:
                continue
            count = min(asked.num_tokens - asked.computed, self.draw.randint(1, chunk))
            count = self._with_drafts(asked, count)
            while not self._allocate(asked, count):
                if self.state.ask():
                    count = 0
                    break
                preempted = True
                last = self.running.pop()
                scheduled.pop(last.request_id, None)
                self._preempt(last)
                if last is asked:
                    count = 0
                    break
            if not count:
                break
            scheduled[asked.request_id] = count
        while self.waiting and not preempted:
            asked = self.waiting[0]
            count = min(asked.num_tokens, self.draw.randint(1, chunk))
            count = self._with_drafts(asked, count)
            if self._lacks(asked, asked.num_tokens) or not self._allocate(asked, count):
                break
            self.running.append(self.waiting.pop(0))
            scheduled[asked.request_id] = count
        self.turns = {a.request_id: a for a in self.running if a.request_id in scheduled}
        new = [a for a in self.turns.values() if not a.told]
        cached = [a for a in self.turns.values() if a.told]
        for asked in new:
            asked.told = True
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=a.request_id, num_computed_tokens=a.computed) for a in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[a.request_id for a in cached],
                num_computed_tokens=[a.computed for a in cached],
            ),
            num_scheduled_tokens={name: scheduled[name] for name in self.turns},
            scheduled_spec_decode_tokens={
                name: [-1] * self.drafted[name] for name in self.turns if self.drafted.get(name)
            },
        )

    def _with_drafts(self, asked: Asked, count: int) -> int:
        """Add drafts to the last token of a request; the last of a prompt is padded, as in vLLM."""
        if self.drafts and count == 1 and asked.computed + count == asked.num_tokens:
            decodes = asked.computed >= self.manager.prompts.get(asked.request_id, 10**6)
            self.drafted[asked.request_id] = self.draw.randint(0, self.drafts)
            if not decodes and self.drafted[asked.request_id]:
                self.drafted[asked.request_id] = self.drafts
            return count + self.drafted[asked.request_id]
        return count

    def _let_others(self) -> None:
        """Free some blocks of other layers, take others and clear these, as vLLM does."""
        pool, mine = self.manager.block_pool, self.held_by_others
        if mine and self.draw.random() < 0.5:
            count = self.draw.randint(1, len(mine))
            self._leave(mine[:count])
            del mine[:count]
        most = min(self.others - len(mine), pool.get_num_free_blocks())
        if most > 0 and self.draw.random() < 0.5:
            new = pool.get_new_blocks(self.draw.randint(1, most))
            self.memory.data[self._pages_of(new)] = 0
            mine += new

    def _leave(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.memory.data[self._pages_of(blocks)] = POISON
        self.manager.block_pool.free_blocks(blocks)

    def _pages_of(self, blocks: Sequence[KVCacheBlock]) -> Tensor:
        return self.memory.pages([block.block_id for block in blocks])

    def _lacks(self, asked: Asked, tokens: int) -> bool:
        missing = self.manager.get_num_blocks_to_allocate(asked.request_id, tokens)
        return missing > self.manager.block_pool.get_num_free_blocks()

    def _allocate(self, asked: Asked, count: int) -> bool:
        if self._lacks(asked, asked.computed + count):
            return False
        self.manager.allocate_new_blocks(asked.request_id, asked.computed + count)
        return True

    def _preempt(self, asked: Asked) -> None:
        self._free(asked)
        asked.computed, asked.right = 0, []
        self.waiting.insert(0, asked)
        self.preemptions += 1

    def _free(self, asked: Asked) -> None:
        blocks = self.manager.pop_blocks_for_free(asked.request_id)
        self.manager.block_pool.free_blocks(reversed(blocks))

    def _work(self, orders: StepMetadata) -> WorkerReport:
        self.shorts += orders.short
        with torch.inference_mode():
            self.moves += bool(
                torch.isin(self.memory.pages(orders.changes.leaving), self._pages()).any()
            )
            self.worker.rows = self._rows(orders)  # which vLLM builds before
            self.worker.begin(orders)
            self.memory.data[self._pages_of(self.held_by_others)] = FOREIGN
            self._read_right(orders)
            for name in self.worker.compressed:
                self._named(name).alone.compress()
            self.compressed += len(self.worker.compressed)
            if orders.requests:
                self._attend(orders)
            reports = self.worker.end()
        self._check_pages(reports, orders)
        return reports

    def _read_right(self, orders: StepMetadata) -> None:
        """Let reference caches read the drafts that were right, as the worker has stored them."""
        for step in orders.requests.values():
            asked = self.turns[step.request]
            for token in asked.right:
                assert asked.alone is not None
                self._read(asked.alone, token, prompt=False)
            asked.right = []

    def _attend(self, orders: StepMetadata) -> None:
        steps, rows = orders.requests.values(), self._rows(orders)
        right = [self._right(step) for step in steps]
        known = [
            self.turns[x.request].tokens(x.known + n, self.shape)
            for x, n in zip(steps, right, strict=True)
        ]
        wanted = [self._alone(step, each) for step, each in zip(steps, known, strict=True)]
        brought, start = (
            [self._padded(each, x.tokens) for x, each in zip(steps, known, strict=True)],
            rows.start,
        )
        for layer in range(self.shape.layers):
            fresh = [torch.cat([each[layer][i] for each in brought]) for i in range(3)]
            heads = self.shape.kv_heads * self.shape.group
            out = torch.full((start[-1], heads, self.shape.value_dim), torch.nan)
            self.worker.requests.attend(layer, rows, *fresh, out)
            for i, each in enumerate(wanted):
                mine = out[start[i] : start[i + 1]]
                if each is None:
                    assert bool(mine.isfinite().all())
                else:
                    torch.testing.assert_close(mine[: len(each[layer])], each[layer])
        for step, count in zip(steps, right, strict=True):
            asked = self.turns[step.request]
            asked.stored = asked.computed + step.known
            asked.computed = asked.stored + count
            if asked.computed >= asked.num_tokens:
                asked.num_tokens = asked.computed + 1  # one is generated
            self.accepted, self.rejected = (
                self.accepted + count,
                self.rejected + step.drafts - count,
            )

    def _right(self, step: RequestStep) -> int:
        """Choose how many of a step's drafts are right; those that pad a prompt are not."""
        return self.draw.randint(0, step.drafts) if step.drafts and not step.is_prefill else 0

    def _padded(
        self, given: list[tuple[Tensor, Tensor, Tensor]], count: int
    ) -> list[tuple[Tensor, ...]]:
        """Add vectors of wrong drafts, up to a number of tokens."""
        return [
            tuple(torch.cat((x, torch.randn(count - len(x), *x.shape[1:]).to(x))) for x in layer)
            for layer in given
        ]

    def _rows(self, orders: StepMetadata) -> RequestRows:
        counts = [step.tokens for step in orders.requests.values()]
        return RequestRows(tuple(orders.requests), (0, *accumulate(counts)))

    def _alone(
        self, step: RequestStep, brought: Sequence[tuple[Tensor, ...]]
    ) -> list[Tensor] | None:
        """Return the attention of a step's tokens over the request's reference cache."""
        asked = self.turns[step.request]
        assert step.computed == asked.computed
        try:
            return None if asked.broken else self._seen(step, asked, brought)
        except Failure:
            asked.broken = True
            return None

    def _seen(
        self, step: RequestStep, asked: Asked, brought: Sequence[tuple[Tensor, ...]]
    ) -> list[Tensor]:
        if step.computed == 0:
            assert step.prompt == asked.num_tokens
            budgets = None if step.budget is None else (step.budget,)
            kept = {"budgets": budgets, "page_tokens": self.block_tokens, "backend": "torch"}
            asked.alone = PolicyCache(self.policy, self.shape, **kept)
        assert asked.alone is not None
        reads, count = step.computed < step.prompt, step.known
        left = max(0, step.prompt - step.computed - count)
        found = self._read(
            asked.alone, [tuple(x[:count] for x in layer) for layer in brought], reads, left
        )
        copied = deepcopy(asked.alone) if len(brought[0][0]) > count else asked.alone
        asked.right = [
            [(q[i : i + 1], k[i : i + 1], v[i : i + 1]) for q, k, v in brought]
            for i in range(count, len(brought[0][0]))
        ]
        for token in asked.right:
            seen = self._read(copied, token, prompt=False)
            found = [torch.cat(pair) for pair in zip(found, seen, strict=True)]
        return found

    def _read(
        self,
        cache: PolicyCache,
        brought: Sequence[tuple[Tensor, ...]],
        prompt: bool,
        remaining: int = 0,
    ) -> list[Tensor]:
        """Return the attention of tokens by layer, after which a reference cache holds them."""
        every, found = torch.ones(1, len(brought[0][0]), dtype=torch.bool), []
        cache.begin(every, prompt=prompt, remaining=remaining)
        for layer, (query, key, value) in enumerate(brought):
            grouped = query[None].unflatten(2, (self.shape.kv_heads, -1)).permute(0, 2, 3, 1, 4)
            fresh = key[None].transpose(1, 2), value[None].transpose(1, 2)
            out = cache.attend(layer, grouped, *fresh, SCALE)
            found.append(out.permute(0, 3, 1, 2, 4).flatten(2, 3)[0])
        return found

    def _named(self, name: str) -> Asked:
        return next(a for a in (*self.running, *self.waiting) if a.request_id == name)

    def _batches(self) -> list[tuple[list[str], Batch]]:
        requests = self.worker.requests
        caches = [([name], cache) for name, cache in requests.prefills.items()]
        if requests.decoding is not None:
            caches.append((requests.names, requests.decoding))
        return [(names, cache.batch) for names, cache in caches if cache.batch is not None]

    def _pages(self) -> Tensor:
        none = torch.zeros(0, dtype=torch.long)
        return torch.cat([none, *(batch.pages() for _, batch in self._batches())])

    def held(self) -> dict[str, int]:
        """Return the pages of every request in the worker."""
        return {
            name: pages
            for names, batch in self._batches()
            for name, pages in zip(names, batch.pages_used().tolist(), strict=True)
            if name
        }

    def _check_pages(self, reports: WorkerReport, orders: StepMetadata) -> None:
        """Assert that the last step's pages are reported, and that blocks cover those held."""
        held = self.held()
        assert self.worker.pool.used == sum(held.values()) + self._foreign_pages()
        assert bool((self.memory.data[self._pages_of(self.held_by_others)] == FOREIGN).all())
        failed = set(self.worker.requests.failed)
        named = {step.request for step in orders.requests.values()} | self.worker.compressed
        now = {n: (held[n], self._named(n).stored) for n in named - failed}
        due, self.unreported = self.unreported, now
        if not orders.requests:  # there is nothing to wait for
            due, self.unreported = due | now, {}
        assert {n: (told.pages, told.computed) for n, told in reports.told.items()} == due
        late = bool(orders.requests)
        assert (reports.step, reports.begun) == (orders.step - late, orders.step)
        alive = {a.request_id for a in self.running} - failed
        assert set(held) == alive
        for name, pages in held.items():
            assert pages <= len(self.manager.owned(name)) * self.account.block_pages

    def _foreign_pages(self) -> int:
        """Count the pages that are not in blocks of requests, nor in idle ones, nor the last."""
        source = self.manager.source
        if not isinstance(source, SharedPool):
            return 0
        ours = source.owned + len(source.idle) + 1
        return self.worker.pool.capacity - (ours * self.account.block_pages - 1)

    def check_blocks(self) -> None:
        """Assert that every block is free, idle, or owned by exactly one running request."""
        pool, source = self.manager.block_pool, self.manager.source
        owned = [b.block_id for a in self.running for b in self.manager.owned(a.request_id)]
        if isinstance(source, SharedPool):
            assert source.owned == len(owned)
            moving = [block for blocks in source.moving.values() for block in blocks]
            owned += [b.block_id for b in (*source.idle, *moving, *self.held_by_others)]
        assert len(set(owned)) == len(owned)
        assert pool.null_block.block_id not in owned
        assert all(pool.blocks[i].ref_cnt == 1 for i in owned)
        assert pool.get_num_free_blocks() + len(owned) == self.blocks

    def check_empty(self) -> None:
        """Assert that all blocks and pages are free after the last request."""
        assert not self.running
        assert not self.waiting
        for _ in range(3):
            self.step()
        self._leave(self.held_by_others)
        self.held_by_others.clear()
        assert self.manager.block_pool.get_num_free_blocks() == self.blocks
        assert self.worker.pool.used == self._foreign_pages()
        assert self.held() == {}
        left = self.memory.data[:-1]
        assert bool(((left == POISON) | (left == 0)).all())
        state = self.state
        assert [*state.requests, *state.budgets, *state.manager.prompts, *state.known] == []
        assert [
            *state.serials,
            *state.refused,
            *self.worker.requests.failed,
            *self.worker.requests.serials,
        ] == []
