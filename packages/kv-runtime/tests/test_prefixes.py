"""Requests that continue a stored prefix see what they would had they read it themselves."""

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kv_paging import PagePool
from kv_policy import KVPolicy, parse
from kv_runtime import Layout, PolicyCache, RequestBatch, RequestRows, RequestStep, appends_only
from tiered_policies import SHAPE

SCALE, CHUNK, LENGTH = 0.4, 7, 64
HEADS = SHAPE.kv_heads * SHAPE.group
POLICIES = (
    "k8v4",
    "k8v4:window=8",
    "k4v4:keys=channel,block=16,window=4",
    "k4v4:keys=channel,block=4",
    "snapkv:budget=12,window=4+k8v4",
    "streaming:budget=12",
    "snapkv:budget=12,window=4+k4v4:keys=channel,block=4",
    "kv-compress:rate=2,floor=12",
    "h2o:budget=12",
    "leankv:window=4",
    "k8v4+quest:budget=20,sinks=0,recent=0,whole=1",  # the page that is appended to, and another
    "snapkv:budget=40,window=4+k8v4+quest:budget=20,sinks=0,recent=0,whole=0",
)
FIXED = (("k8v4:window=8", 4), ("snapkv:budget=12,window=4+k8v4", 4))  # memory of fixed addresses
BOUNDARY, PROMPT = 24, 31


@dataclass
class Request:
    """A request: its tokens, its boundary, and a cache of its own that it is compared with."""

    policy: KVPolicy
    seed: int  # of the tokens after the boundary; those before are the same for all
    boundary: int | None = BOUNDARY
    prompt: int = PROMPT
    computed: int = 0

    def __post_init__(self) -> None:
        first, rest = (torch.Generator().manual_seed(each) for each in (1, 100 + self.seed))
        sizes = (HEADS, SHAPE.key_dim), (SHAPE.kv_heads, SHAPE.key_dim)
        sizes = (*sizes, (SHAPE.kv_heads, SHAPE.value_dim))
        split, layers = BOUNDARY, SHAPE.layers
        self.tokens = [
            torch.cat(
                (
                    torch.randn(layers, split, *size, generator=first),
                    torch.randn(layers, LENGTH - split, *size, generator=rest),
                ),
                1,
            )
            for size in sizes
        ]
        self.cache, self.done = PolicyCache(self.policy, SHAPE, backend="torch"), 0

    @property
    def next(self) -> int:
        """How many tokens the next step has."""
        if self.computed >= self.prompt:
            return 1
        stop = self.prompt
        if self.boundary is not None and self.computed < self.boundary:
            stop = self.boundary
        return min(CHUNK, stop - self.computed)

    def alone(self, until: int) -> Tensor:
        """Return what the tokens of the last step up to `until` see in a cache of their own."""
        outs: list[Tensor] = []
        while self.done < until:
            begin, outs = self.done, []
            mark = self.computed
            self.computed = begin
            count = self.next
            self.computed = mark
            stop = self.prompt
            if self.boundary is not None and begin < self.boundary:
                stop = self.boundary
            prompt = begin < self.prompt
            left = max(0, stop - begin - count) if prompt else 0
            self.cache.begin(torch.ones(1, count, dtype=torch.bool), prompt=prompt, remaining=left)
            for layer in range(SHAPE.layers):
                q, k, v = (x[layer, begin : begin + count][None] for x in self.tokens)
                grouped = q.unflatten(2, (SHAPE.kv_heads, -1)).permute(0, 2, 3, 1, 4)
                out = self.cache.attend(layer, grouped, k.transpose(1, 2), v.transpose(1, 2), SCALE)
                outs.append(out.permute(0, 3, 1, 2, 4).flatten(2, 3)[0])
            self.done += count
        return torch.stack(outs)


@dataclass
class Engine:
    """Requests in steps, over one poisoned pool."""

    policy: KVPolicy
    fixed: int = 0
    pages: int = 1200
    requests: dict[str, Request] = field(default_factory=dict)
    told: dict[str, Exception] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = Layout.of(self.policy, SHAPE, None, 16, pooled=True).page_bytes
        memory = torch.full((self.pages, size), 255, dtype=torch.uint8)
        self.pool = PagePool.over(memory, poison=True)
        empty = PolicyCache(self.policy, SHAPE, backend="torch", pool=self.pool, careful=True)
        self.batch = RequestBatch(empty, SCALE, self.told.__setitem__)
        if self.fixed:
            self.batch.fix(self.fixed, LENGTH)

    def step(
        self,
        *names: str,
        base: dict[str, int] | None = None,
        keep: dict[str, int] | None = None,
        gone: tuple[str, ...] = (),
        kept: dict[str, int] | None = None,
        dropped: tuple[int, ...] = (),
    ) -> None:
        """Do a step, and check what every token sees."""
        steps, start, brought = {}, [0], []
        for key, name in enumerate(names):
            request = self.requests[name]
            found = (base or {}).get(name)
            if found is not None:
                request.computed = BOUNDARY
            done, count = request.computed, request.next
            steps[key] = RequestStep(
                name,
                done,
                count,
                request.prompt,
                serial=10 + key,
                base=found,
                boundary=request.boundary,
                keep=(keep or {}).get(name) if done + count == request.boundary else None,
            )
            brought.append([x[:, done : done + count] for x in request.tokens])
            start.append(start[-1] + count)
            request.computed = done + count
        self.batch.begin(steps, gone, kept or {}, dropped)
        rows, outs = RequestRows(tuple(steps), tuple(start)), []
        for layer in range(SHAPE.layers):
            given = [torch.cat([x[i][layer] for x in brought]) for i in range(3)]
            outs.append(torch.full((start[-1], HEADS, SHAPE.value_dim), torch.nan))
            self.batch.attend(layer, rows, *given, outs[-1])
        self.batch.end()
        assert not self.told
        whole = torch.stack(outs)
        for i, name in enumerate(names):
            request = self.requests[name]
            seen = whole[:, start[i] : start[i + 1]]
            expected = request.alone(request.computed)
            torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5, equal_nan=False)


def ready(engine: Engine) -> None:
    """Let the request `a` read its prompt, and store its first tokens as prefix 7."""
    engine.requests["a"] = Request(engine.policy, 0)
    while engine.requests["a"].computed < PROMPT + 2:
        engine.step("a", keep={"a": 7})
    (pages,) = engine.batch.prefixes.told().read().items()
    assert pages[0] == 7
    assert engine.batch.prefixes.told().read() == {}


@pytest.mark.parametrize(("text", "fixed"), [*((text, 0) for text in POLICIES), *FIXED])
def test_requests_continue_a_prefix(text: str, fixed: int) -> None:
    engine = Engine(parse(text), fixed)
    ready(engine)
    for i, name in enumerate("bcd"):
        engine.requests[name] = Request(engine.policy, 1 + i)
    engine.step("a", "b", base={"b": 7})
    engine.step("b", "c", base={"c": 7}, gone=("a",))
    for _ in range(8):
        engine.step("b", "c")
    engine.step("d", "b", base={"d": 7}, gone=("c",))
    engine.step("d", "b", dropped=(7,))
    for _ in range(6):
        engine.step("d", "b")
    engine.batch.begin({}, ("b", "d"))
    assert engine.pool.used == 0
    assert not engine.pool.shares


@pytest.mark.parametrize("text", POLICIES)
def test_a_prefix_that_requests_continue_never_changes(text: str) -> None:
    engine = Engine(parse(text))
    ready(engine)
    engine.requests["b"] = Request(engine.policy, 1)
    engine.step("b", base={"b": 7})
    for _ in range(20):
        engine.step("a", "b")
    engine.requests["c"] = Request(engine.policy, 2)
    engine.step("c", base={"c": 7})  # is compared with a cache that has read the tokens


@pytest.mark.parametrize("text", POLICIES)
def test_the_pages_of_a_prefix_are_counted_once(text: str) -> None:
    engine = Engine(parse(text))
    engine.requests["a"] = Request(engine.policy, 0)
    while engine.requests["a"].computed < PROMPT:
        engine.step("a", keep={"a": 7})
    prefix = engine.batch.prefixes.told().read()[7]
    names = [f"r{i}" for i in range(5)]
    for i, name in enumerate(names):
        engine.requests[name] = Request(engine.policy, 1 + i)
    engine.step(*names, base=dict.fromkeys(names, 7))
    while engine.requests["r0"].computed < PROMPT + 3:
        engine.step("a", *names)
    held = engine.batch.held(kept=False)
    assert prefix + sum(each.pages for each in held.values()) >= engine.pool.used
    if appends_only(engine.policy, planned=True):  # each page is counted once
        assert prefix + sum(each.pages for each in held.values()) == engine.pool.used
    if appends_only(engine.policy, planned=False) and text == "k8v4":  # no full page is copied
        own = SHAPE.layers * SHAPE.kv_heads * 2  # the last page of the prefix, and later tokens
        assert all(each.pages <= own for each in held.values())


@pytest.mark.parametrize(("text", "fixed"), [*((text, 0) for text in POLICIES[::2]), *FIXED])
def test_the_state_of_a_finished_request_is_continued(text: str, fixed: int) -> None:
    engine = Engine(parse(text), fixed)
    request = engine.requests["a"] = Request(engine.policy, 0, boundary=None)
    other = engine.requests["o"] = Request(engine.policy, 5, boundary=None)
    while request.computed < PROMPT + 3:
        engine.step("a", "o")
    used = engine.pool.used
    later = engine.requests["b"] = Request(engine.policy, 0, boundary=None, prompt=PROMPT + 9)
    later.cache, later.done = request.cache, request.done  # its next turn
    later.computed = request.computed
    steps = {0: RequestStep("b", later.computed, 6, later.prompt, serial=30, base=9)}
    engine.batch.begin(steps, (), {"a": 9})
    assert 9 in engine.batch.prefixes.caches
    begin, outs = later.computed, []
    for layer in range(SHAPE.layers):
        given = [x[layer, begin : begin + 6] for x in later.tokens]
        outs.append(torch.full((6, HEADS, SHAPE.value_dim), torch.nan))
        engine.batch.attend(layer, RequestRows((0,), (0, 6)), *given, outs[-1])
    engine.batch.end()
    assert not engine.told
    later.computed += 6
    later.cache.begin(torch.ones(1, 6, dtype=torch.bool), prompt=True)
    for layer in range(SHAPE.layers):
        q, k, v = (x[layer, begin : begin + 6][None] for x in later.tokens)
        grouped = q.unflatten(2, (SHAPE.kv_heads, -1)).permute(0, 2, 3, 1, 4)
        out = later.cache.attend(layer, grouped, k.transpose(1, 2), v.transpose(1, 2), SCALE)
        expected = out.permute(0, 3, 1, 2, 4).flatten(2, 3)[0]
        torch.testing.assert_close(outs[layer], expected, rtol=1e-4, atol=1e-5)
    later.done = later.computed
    for _ in range(3):
        engine.step("o", "b")
    assert other.computed == request.computed + 3
    assert used > 0
    engine.batch.begin({}, ("b", "o"), {}, (9,))
    assert engine.pool.used == 0


def test_a_prefix_without_room_is_not_stored_and_the_request_goes_on() -> None:
    engine = Engine(parse("k8v4"), pages=14)  # a page more than the request holds
    engine.requests["a"] = Request(engine.policy, 0)
    while engine.requests["a"].computed < PROMPT + 1:
        engine.step("a", keep={"a": 7})
    assert engine.batch.prefixes.told().read() == {}
    assert not engine.batch.failed


def test_a_prefix_that_is_not_there_fails_its_request_alone() -> None:
    engine = Engine(parse("k8v4"))
    ready(engine)
    engine.requests["b"] = Request(engine.policy, 1)
    steps = {
        0: RequestStep("a", engine.requests["a"].computed, 1, PROMPT, serial=10),
        1: RequestStep("b", BOUNDARY, 7, PROMPT, serial=11, base=8),
    }
    engine.batch.begin(steps, ())
    for layer in range(SHAPE.layers):
        given = [torch.randn(8, *x.shape[2:]) for x in engine.requests["a"].tokens]
        engine.batch.attend(
            layer, RequestRows((0, 1), (0, 1, 8)), *given, torch.empty(8, HEADS, SHAPE.value_dim)
        )
    engine.batch.end()
    assert engine.batch.failed == {"b": 11}
    assert "prefix 8 is not stored here; [7] are" in str(engine.told["b"])


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
@pytest.mark.parametrize("text", ["k8v4", "k4v4:keys=channel,block=4", "snapkv:budget=12,window=4"])
def test_prefixes_of_prefixes_come_and_go(text: str, seed: int) -> None:
    draw = random.Random(seed)
    engine = Engine(parse(text))
    ready(engine)
    stored, number, running = [7], 8, ["a"]
    for turn in range(12):
        name = f"n{turn}"
        engine.requests[name] = Request(engine.policy, 1 + turn)
        engine.step(name, *running, base={name: draw.choice(stored)})
        running.append(name)
        ended = draw.choice(running)
        running.remove(ended)
        kept = {}
        if draw.random() < 0.5 and engine.requests[ended].computed >= PROMPT:
            kept, number = {ended: number}, number + 1
        dropped = (stored.pop(),) if len(stored) > 1 and draw.random() < 0.5 else ()
        engine.step(*running, gone=(ended,), kept=kept, dropped=dropped)
        every = [engine.batch.decoding, *engine.batch.prefills.values()]
        every += engine.batch.prefixes.caches.values()
        batches = [each.batch for each in every if each is not None and each.batch is not None]
        engine.pool.check(torch.cat([each.pages() for each in batches]))
    engine.batch.begin({}, running, {}, tuple(engine.batch.prefixes.caches))
    assert engine.pool.used == 0
