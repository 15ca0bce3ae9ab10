"""A worker without vLLM: for any order of events, each request matches a separate cache."""

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch
from torch import Tensor

from kv_evict.schedule import cheapest_pages
from kv_policy import (
    Budget,
    CacheShape,
    Evictor,
    KVPolicy,
    LayerView,
    PlanView,
    Replan,
    compose,
    parse,
)
from kv_runtime.copies import HostCopy
from tiered_policies import Turned

if TYPE_CHECKING:
    from paged_engine import Engine

SHAPE = CacheShape(layers=2, kv_heads=2, group=2, key_dim=6, value_dim=5, dtype=torch.float32)
COMPRESS = "kv-compress:rate=2,floor=12,recent=4,window=4,short=true"
CASES = [  # a policy, and whether reports arrive late
    ("k4v4:keys=channel,block=16,window=4", True),
    (COMPRESS, True),
    ("k8v4+quest:budget=20,sinks=0,recent=0,whole=1", False),
    *(
        pytest.param(text, False, marks=pytest.mark.slow)
        for text in (
            "leankv:window=4",
            "k8v4:window=8",
            "snapkv:budget=12,window=4+k8v4",
            f"{COMPRESS}+quest:budget=8,sinks=0,recent=0,whole=0",
        )
    ),
]
RAGGED = Turned("62", "15")  # the ranks differ per layer and head


@dataclass(frozen=True)
class Longest(Evictor):
    """Keep the pages with the longest keys, after each chunk and when pages are short."""

    name: ClassVar[str] = "longest"
    reads = frozenset({"keys"})
    scores_once = True
    plans_chunks = True
    scope = "model"
    replan = Replan(short=True)

    def score(self, view: LayerView) -> Tensor:
        """Return the norm of a key."""
        assert view.keys is not None
        return view.keys.norm(dim=-1)

    def plan(self, view: PlanView) -> Tensor:
        """Evict the cheapest pages."""
        return cheapest_pages(view, sinks=1, recent=3)


@dataclass(frozen=True)
class Growing(Longest):
    """The same, after each chunk only."""

    name: ClassVar[str] = "growing"
    replan = Replan()


def soak(
    engine: "Engine",
    requests: int,
    longest: int,
    draw: random.Random,
    budgets: tuple[object, ...] = (None, "20%", 24),
) -> None:
    """Requests arrive, are prefilled in chunks, decode, pause, are preempted and aborted."""
    if engine.policy.selector is None or engine.policy.selector.budget is None:
        budgets = (None,)
    asked = 0
    while asked < requests or engine.running or engine.waiting:
        if asked < requests and draw.random() < 0.9:
            own = draw.choice(budgets)
            engine.ask(f"r{asked}", draw.randint(1, longest), own)
            asked += 1
        engine.step(left_out=0.1, chunk=draw.choice((3, 17, 64)))
        for each in list(engine.running):
            generated = each.num_tokens - each.prompt
            if draw.random() < 0.02 or generated > draw.randint(20, 50):
                engine.finish(each)
        if engine.waiting and draw.random() < 0.02:
            engine.finish(draw.choice(engine.waiting))
        assert engine.steps < 1000, "no progress"
    engine.check_empty()


def room(engine_class: "type[Engine]", policy: object, longest: int, **more: object) -> "Engine":
    """Create an engine with memory for just one of the longest requests."""
    small = engine_class(policy, SHAPE, 1, **more)
    return engine_class(policy, SHAPE, small.manager.blocks_for(longest), **more)


@pytest.mark.parametrize(("text", "late"), CASES)
def test_every_request_sees_and_holds_what_it_would_alone(
    engine_class: "type[Engine]", text: str, late: bool
) -> None:
    engine = room(engine_class, parse(text), 100, late=late)
    soak(engine, 7, 50, random.Random(0))
    assert engine.preemptions
    if "short" in text:
        assert engine.shorts


@pytest.mark.parametrize(
    ("policy", "late", "others"),
    [
        (parse("k4v4:keys=channel,block=16,window=4"), True, 0),
        (parse("snapkv:budget=12,window=4+k4v2"), False, 6),
        (compose(Growing(Budget(24)), parse("k4v2:window=4")), True, 0),
        (compose(Longest(Budget(24)), parse("k4v2")), False, 0),
        pytest.param(parse("k4v2:window=8"), True, 6, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_drafts_change_nothing_that_requests_see_or_hold(
    engine_class: "type[Engine]", policy: KVPolicy, late: bool, others: int
) -> None:
    """Wrong ones are taken back, right ones are stored when the next step tells, or never."""
    engine = room(engine_class, policy, 100, late=late, others=others, drafts=3)
    soak(engine, 7, 50, random.Random(0), (None, 16, 24))
    assert engine.preemptions
    assert engine.accepted > 20
    assert engine.rejected > 20
    assert not engine.worker.requests.pending


@pytest.mark.parametrize(
    "text",
    [
        COMPRESS,
        "leankv:window=4",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("k8v4:window=8", "streaming:budget=24")
        ),
    ],
)
def test_requests_decode_in_memory_of_fixed_addresses(
    engine_class: "type[Engine]", text: str
) -> None:
    """They join and end in place, in any order, and no tensor of their state is replaced."""
    engine = room(engine_class, parse(text), 100, late=True, fixed=8)
    batch = engine.worker.requests.decoding.batch
    assert batch is not None

    def addresses() -> list[int]:
        ring, window = batch.pool.ring, batch.window
        held = [batch.seen, ring.ids, ring.start, ring.count]
        held += [x for store in batch.tiers.parts for x in (store.length, store.table)]
        if window is not None:
            held += [window.position, *(x for s in window.stores for x in (s.length, s.table))]
        return [x.data_ptr() for x in held]

    before = addresses()
    soak(engine, 7, 50, random.Random(0))
    assert engine.preemptions
    assert addresses() == before
    assert batch.vacant == set(range(8))


@pytest.mark.parametrize(
    ("text", "late"),
    [
        (COMPRESS, True),
        ("leankv:window=4", False),
        pytest.param("k4v4:keys=channel,block=16,window=4", True, marks=pytest.mark.slow),
    ],
)
def test_pages_move_out_of_blocks_that_other_layers_take(
    engine_class: "type[Engine]", text: str, late: bool
) -> None:
    engine = room(engine_class, parse(text), 100, late=late, others=6)
    soak(engine, 7, 50, random.Random(0))
    assert engine.moves


@pytest.mark.parametrize(
    ("policy", "late"),
    [
        (parse("streaming:budget=24,chunks=true"), True),
        (Longest(Budget(24)), False),
        (compose(Longest(Budget(24)), parse("k4v4:keys=channel,block=16,window=4")), True),
    ],
    ids=str,
)
def test_prompts_that_never_fit_are_planned_by_chunk(
    engine_class: "type[Engine]", policy: KVPolicy, late: bool
) -> None:
    small = engine_class(policy, SHAPE, 1, late=late)
    blocks = small.manager.blocks_for(10**6, kept=24)
    assert blocks < small.manager.blocks_for(400) / 2
    engine = engine_class(policy, SHAPE, blocks, late=late)
    soak(engine, 4, 400, random.Random(3), (None, 16, 24))


def test_an_answer_that_outgrows_all_memory_goes_on(engine_class: "type[Engine]") -> None:
    """A request that is alone is preempted, and read again by chunk."""
    policy = Growing(Budget(24))
    blocks = engine_class(policy, SHAPE, 1, late=True).manager.blocks_for(10**6, kept=24)
    engine = engine_class(policy, SHAPE, blocks, late=True)
    asked = engine.ask("a", 100)
    while asked.num_tokens < 240:
        engine.step()
        assert engine.steps < 1000, "no progress"
    assert engine.preemptions
    assert engine.manager.blocks_for(asked.num_tokens) > 2 * blocks
    engine.finish(asked)
    engine.check_empty()


@pytest.mark.parametrize("layers", [0, 1])
def test_a_step_whose_tokens_did_not_reach_all_layers_raises(
    engine_class: "type[Engine]", monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    """Its output is made up: vLLM has run the model outside of the connector's step."""
    engine = engine_class(parse("raw"), SHAPE, 40)
    attend = engine.worker.requests.attend
    monkeypatch.setattr(
        type(engine.worker.requests),
        "attend",
        lambda _, layer, *given: attend(layer, *given) if layer < layers else given[-1].zero_(),
    )
    monkeypatch.setattr("torch.testing.assert_close", lambda *_: None)
    engine.ask("a", 20)
    with pytest.raises(RuntimeError, match="did not reach all layers under the policy"):
        engine.step()


def test_a_graph_that_was_not_launched_raises_a_step_later(
    engine_class: "type[Engine]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which the tokens computed tell, counted on the device."""
    engine = engine_class(parse("raw"), SHAPE, 40, fixed=2)
    engine.ask("a", 20)
    engine.step(chunk=10**6)
    monkeypatch.setattr(
        type(engine.worker.requests), "attend", lambda _, layer, *given: given[-1].zero_()
    )
    monkeypatch.setattr("torch.testing.assert_close", lambda *_: None)
    while not engine.worker.requests.names[0]:
        engine.step(chunk=10**6)
    engine.step()
    with pytest.raises(RuntimeError, match="did not reach all layers under the policy"):
        engine.step()


@pytest.mark.parametrize("late", [False, True])
def test_as_many_requests_as_free_what_is_short_are_compressed(
    engine_class: "type[Engine]", late: bool
) -> None:
    # Small pages: tokens generated since a plan fill some pages of each head.
    engine = room(engine_class, parse(COMPRESS), 150, late=late, block_tokens=4)
    soak(engine, 9, 50, random.Random(2))
    assert engine.compressed
    assert engine.preemptions  # because all of them together freed too little


def test_a_step_reads_what_the_step_before_has_counted(
    engine_class: "type[Engine]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own counts come from the device behind its forward pass, which would be waited for."""
    made: list[HostCopy] = []
    read: list[HostCopy] = []

    def begun(cls: type[HostCopy], x: Tensor) -> HostCopy:
        made.append(cls(x, None))
        return made[-1]

    def arrived(self: HostCopy) -> Tensor:
        read.append(self)
        return self.copy

    monkeypatch.setattr(HostCopy, "of", classmethod(begun))
    monkeypatch.setattr(HostCopy, "read", arrived)
    engine = engine_class(parse(COMPRESS), SHAPE, 40)
    asked = [engine.ask(name, 20) for name in "ab"]
    for count in range(6):
        engine.step(chunk=10**6)
        assert len(made) == count + 1
        assert [each is made[i] for i, each in enumerate(read)] == [True] * count
    for each in asked:
        engine.finish(each)
    engine.step()  # without tokens, so there is no forward pass
    assert read[-1] is made[5]
    engine.check_empty()


def test_heads_with_ranks_of_their_own(engine_class: "type[Engine]") -> None:
    engine = room(engine_class, compose(parse(COMPRESS), RAGGED), 100)
    soak(engine, 7, 50, random.Random(1))
    assert engine.preemptions


def test_pages_are_as_long_as_blocks_where_users_say_how_long(
    engine_class: "type[Engine]",
) -> None:
    engine = engine_class(parse("snapkv:budget=64+k8v4"), SHAPE, 40, block_tokens=32)
    engine.ask("a", 320)
    engine.step(chunk=10**6)
    while engine.running[0].computed < 320:
        engine.step(chunk=10**6)
    engine.step()  # which reports the end of the prompt
    assert len(engine.manager.owned("a")) == 3  # of 64 tokens, and of the next
