"""Requests over one pool: each sees and holds what it would alone, and fails alone."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kv_evict import Knorm
from kv_paging import PagePool
from kv_policy import Budget, KVPolicy, LayerView, parse
from kv_runtime import PolicyCache, RequestBatch, RequestStep
from requested import CHUNK, PROMPTS, SCALE, drawn, seen_alone, stepped
from tiered_policies import SHAPE

POLICIES = (
    "raw",
    "k8v4:window=8",
    "snapkv:budget=12,window=4+k8v4",
    "streaming:budget=9",
    "d2o:budget=9,every=0+k8v4",
    "cam:budget=9,every=0,targets=2",
)


@dataclass
class Engine:
    """Prefills in chunks, then decodes; every token of a request is drawn beforehand."""

    policy: KVPolicy
    readers: int = 0  # further layers that attend to the keys and values of each layer
    fixed: int = 0  # requests with memory of fixed addresses; 0: the memory changes its place
    batch: RequestBatch = field(init=False)
    told: dict[str, Exception] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PROMPTS, 0))

    def __post_init__(self) -> None:
        size = PolicyCache(self.policy, SHAPE).layout.page_bytes
        memory = torch.full((400, size), 255, dtype=torch.uint8)
        pool = PagePool.over(memory, poison=True)
        empty = PolicyCache(self.policy, SHAPE, backend="torch", pool=pool, careful=True)
        self.pool, self.batch = pool, RequestBatch(empty, SCALE, self.told.__setitem__)
        if self.fixed:
            self.batch.fix(self.fixed, 40)
        draw = torch.Generator().manual_seed(2)
        self.tokens = drawn(draw, 40)

    def step(self, *names: str, gone: tuple[str, ...] = (), **more: object) -> dict[str, Tensor]:
        """Do a step of these requests, and give what their tokens see, by layer."""
        steps, brought = {}, []
        for key, name in enumerate(names):
            done, prompt = self.computed[name], PROMPTS[name]
            count = min(CHUNK, prompt - done) if done < prompt else 1
            steps[key] = RequestStep(name, done, count, prompt, serial=10 + key, **more)
            brought.append([x[:, done : done + count] for x in self.tokens[name]])
            self.computed[name] = done + count
        found = stepped(self.batch, steps, brought, gone, self.readers)
        return dict(zip(names, found, strict=True))

    def alone(self, name: str) -> Iterator[Tensor]:
        """What the tokens of a request see, step by step, in a cache that it has for itself."""
        return seen_alone(self.policy, self.tokens[name], PROMPTS[name], self.readers)


@pytest.mark.parametrize("fixed", [0, 4])
@pytest.mark.parametrize(("text", "readers"), [*((text, 0) for text in POLICIES), (POLICIES[2], 2)])
def test_requests_see_what_they_would_alone_and_give_all_pages_back(
    text: str, readers: int, fixed: int
) -> None:
    engine = Engine(parse(text), readers, fixed)
    alone = {name: engine.alone(name) for name in PROMPTS}
    for names in ("a", "ab", "abc", "bca", "cab", "ab", "abc"):
        for name, found in engine.step(*names).items():
            torch.testing.assert_close(found, next(alone[name]), rtol=1e-4, atol=1e-5)
        held = engine.batch.held(kept=True)
        assert engine.pool.used == sum(each.pages for each in held.values())
        assert {name: each.computed for name, each in held.items()} == {
            name: done for name, done in engine.computed.items() if done
        }
    engine.step("b", gone=("a", "c"))
    assert set(engine.batch.held(kept=False)) == {"b"}
    engine.batch.begin({}, ("b",))
    assert engine.pool.used == 0
    assert not engine.batch.serials


@pytest.mark.parametrize("fixed", [0, 3])
def test_requests_take_the_order_of_adjacent_rows(fixed: int) -> None:
    engine = Engine(parse("snapkv:budget=12,window=4+k8v4"), fixed=fixed)
    alone = {name: engine.alone(name) for name in PROMPTS}

    def step(names: str) -> list[str]:
        for name, found in engine.step(*names).items():
            torch.testing.assert_close(found, next(alone[name]), rtol=1e-4, atol=1e-5)
        return engine.batch.names

    for names in ("abc", "abc", "abc"):
        step(names)
    joined = step("abc")
    # Memory of fixed addresses stays where it is.
    for names in ("cab", "cab", "bca"):
        assert step(names) == (joined if fixed else [*names])
    for names in ("cb", "ac"):  # one of three has no row
        assert step(names) == (joined if fixed else [*"bca"])
    assert step("acb") == (joined if fixed else [*"acb"])


@pytest.mark.parametrize("fixed", [0, 3])
def test_a_request_that_is_refused_fails_alone(fixed: int) -> None:
    engine = Engine(parse("k8v4"), fixed=fixed)
    expected = next(engine.alone("a"))
    assert not engine.step("b", refused="it asks for too much")["b"].any()
    assert str(engine.told["b"]) == "it asks for too much"
    assert engine.batch.failed == {"b": 10}
    found = engine.step("a", "b")  # until it is gone its rows are zero
    assert not found["b"].any()
    torch.testing.assert_close(found["a"], expected)
    engine.step("a", gone=("b",))
    assert not engine.batch.failed


@pytest.mark.parametrize("fixed", [0, 3])
def test_a_budget_of_a_request_is_its_own(fixed: int) -> None:
    engine = Engine(parse("streaming:budget=9"), fixed=fixed)
    for _ in range(5):
        engine.step("a", budget=Budget(15))
    kept = engine.batch.held(kept=True)["a"].kept
    other = Engine(parse("streaming:budget=9"), fixed=fixed)
    for _ in range(5):
        other.step("a")
    less = other.batch.held(kept=True)["a"].kept
    assert (kept, less) == (15 * SHAPE.layers * SHAPE.kv_heads, 9 * SHAPE.layers * SHAPE.kv_heads)


@pytest.mark.parametrize("fixed", [0, 3])
def test_what_a_policy_fails_about_while_decoding_ends_that_request_alone(
    monkeypatch: pytest.MonkeyPatch, fixed: int
) -> None:
    unwanted = torch.empty(0)
    score = Knorm.score

    def failing(self: Knorm, view: LayerView) -> Tensor:
        assert view.keys is not None
        if len(unwanted) and bool((view.keys == unwanted).all(-1).any()):
            raise ArithmeticError("it cannot score this key")
        return score(self, view)

    monkeypatch.setattr(Knorm, "score", failing)
    engine = Engine(parse("knorm:budget=12"), fixed=fixed)
    alone = engine.alone("b")
    for names in ("a", "ab", "ab"):
        if "b" in engine.step(*names):
            next(alone)
    unwanted = engine.tokens["a"][1][0, engine.computed["a"], 0]
    engine.step("a", "b")
    next(alone)
    assert {name: str(error) for name, error in engine.told.items()} == {
        "a": "it cannot score this key"
    }
    found = engine.step("a", "b")
    assert not found["a"].any()
    torch.testing.assert_close(found["b"], next(alone), rtol=1e-4, atol=1e-5)
