"""What the scheduler of vLLM 0.29 does not do by itself, which needs no vLLM of that version."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

if TYPE_CHECKING:
    from kv_serve.vllm.older import AskedFirst

LONGEST = 90


def asked(*answers: bool) -> "AskedFirst":
    """Return a connector that gives these answers in turn, and no more."""
    from kv_serve.vllm.older import AskedFirst

    class Connector(AskedFirst):
        def __init__(self) -> None:
            self.left = list(answers)

        def has_pending_block_frees(self) -> bool:
            return self.left.pop(0)

    return Connector()


def request(name: str, *, status: str = "RUNNING", scheduled: int = 0, **more: int) -> Any:
    from vllm.v1.request import RequestStatus

    given = {"num_computed_tokens": 20, "num_in_flight_tokens": 0, "num_prompt_tokens": 9}
    return SimpleNamespace(
        request_id=name, status=RequestStatus[status], last_sched_seq=scheduled, **given | more
    )


def scheduler(connector: object, free: int, **needed: int) -> Any:
    """Return a scheduler with so many free blocks, and the blocks that requests need."""
    manager = SimpleNamespace(
        coordinator=SimpleNamespace(
            get_num_blocks_to_allocate=lambda **told: needed[told["request_id"]]
        ),
        block_pool=SimpleNamespace(get_num_free_blocks=lambda: free),
        empty_kv_cache_blocks=SimpleNamespace(blocks=((),)),
        remove_skipped_blocks=lambda *given: None,
    )
    return SimpleNamespace(
        connector=connector,
        kv_cache_manager=manager,
        current_step=7,
        max_model_len=LONGEST,
        num_lookahead_tokens=0,
        scheduler_config=SimpleNamespace(policy="fcfs"),
        running=[],
        defer_block_free=True,
        processed_step_seq=3,
    )


def tokens_of(made: Any, one: Any, tokens: int = 5) -> int:
    from kv_serve.vllm.older import _reserved

    return _reserved(lambda self, request, computed, new: new, made, one, 20, tokens)


def test_a_request_that_lacks_blocks_waits_and_so_do_those_behind_it() -> None:
    connector = asked(True, False)
    made = scheduler(connector, 2, a=2, b=3, c=1, d=9)
    made.running = [request(name) for name in "abc"]
    a, b, c = made.running
    assert [tokens_of(made, each) for each in (a, b, c)] == [5, 0, 0]
    assert tokens_of(made, request("d", status="WAITING")) == 5  # vLLM itself counts its blocks
    made.current_step += 1
    assert [tokens_of(made, each) for each in (a, b, c)] == [5, 5, 5]  # vLLM preempts for b
    assert not connector.left


def test_nobody_is_asked_without_need() -> None:
    made = scheduler(asked(), 2, a=2, b=3)
    made.running = [request("a"), request("b")]
    a, b = made.running
    assert (tokens_of(made, a), tokens_of(made, b, 0)) == (5, 0)
    for status in ("WAITING", "PREEMPTED"):
        assert tokens_of(made, request("b", status=status)) == 5
    made.connector = object()  # another one
    assert tokens_of(made, b) == 5
    made.connector = None
    assert tokens_of(made, b) == 5


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_preemption_that_frees_nothing_now_is_postponed(policy: str) -> None:
    order = {"priority": 1, "arrival_time": 2}
    busy, idle = (request(name, scheduled=at, **order) for name, at in (("a", 4), ("b", 3)))
    made = scheduler(asked(False, False, False), 0, a=1, b=1)
    made.scheduler_config.policy = policy
    made.running = [idle, busy]
    if policy == "priority":  # the last of the least important ones, wherever it is
        made.running, busy.arrival_time = [busy, idle], 3
    assert tokens_of(made, idle) == 0
    made.current_step, made.processed_step_seq = 8, 4
    assert tokens_of(made, idle) == 5
    made.current_step, made.processed_step_seq, made.defer_block_free = 9, 3, False
    assert tokens_of(made, idle) == 5


def test_the_connector_has_the_manager_once_it_is_made() -> None:
    from kv_serve.vllm.older import AskedFirst, _made

    bound: list[object] = []

    class Connector(AskedFirst):
        def bind_kv_cache_manager(self, kv_cache_manager: object) -> None:
            super().bind_kv_cache_manager(kv_cache_manager)
            bound.append(kv_cache_manager)

    def make(self: Any, config: object, *, block_size: int) -> None:
        assert (config, block_size) == ("config", 16)
        self.kv_cache_manager = "manager"

    for connector in (Connector(), object(), None):
        _made(make, SimpleNamespace(connector=connector), "config", block_size=16)
    assert bound == ["manager"]


@pytest.mark.parametrize(
    ("version", "times"), [("0.29.0", 1), ("0.30.0", 0), ("0.33.0", 0), ("1.0", 0)]
)
def test_later_schedulers_are_left_as_they_are(
    monkeypatch: pytest.MonkeyPatch, version: str, times: int
) -> None:
    from kv_serve.vllm import adapters, older

    watched: list[bool] = []
    monkeypatch.setattr(adapters, "installed", lambda: version)
    monkeypatch.setattr(older, "watch", lambda: watched.append(True))
    adapters.complete_scheduler()
    assert len(watched) == times


def manager_over(blocks: int, window: int) -> Any:
    """Return vLLM's manager of two kinds of layers, over a pool of so many blocks."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )

    like: dict[str, Any] = {"block_size": 4, "num_kv_heads": 1, "head_size": 8}
    like["dtype"] = torch.float32
    specs = (FullAttentionSpec(**like), SlidingWindowSpec(**like, sliding_window=window))
    groups = [KVCacheGroupSpec([f"layer{at}"], spec) for at, spec in enumerate(specs)]
    config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    sizes = {"scheduler_block_size": 4, "hash_block_size": 4}
    return KVCacheManager(config, max_model_len=LONGEST, enable_caching=False, **sizes)


@given(
    blocks=st.integers(4, 40),
    window=st.integers(2, 30),
    ahead=st.integers(0, 5),
    chunks=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 17), st.integers(0, 3)), min_size=1, max_size=20
    ),
)
def test_blocks_are_lacking_where_vllm_allocates_none(
    blocks: int, window: int, ahead: int, chunks: list[tuple[int, int, int]]
) -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request, RequestStatus

    from kv_serve.vllm.older import _lacks

    def asked(name: str) -> Request:
        made = Request(name, list(range(LONGEST)), SamplingParams(max_tokens=9), None)
        made.status = RequestStatus.RUNNING
        return made

    manager = manager_over(blocks, window)
    made = SimpleNamespace(
        kv_cache_manager=manager, max_model_len=LONGEST, num_lookahead_tokens=ahead
    )
    requests = [asked(name) for name in "abc"]
    for who, tokens, in_flight in chunks:
        one = requests[who]
        tokens = min(tokens, LONGEST - one.num_computed_tokens)
        if not tokens:
            continue
        one.num_in_flight_tokens = min(in_flight, one.num_computed_tokens)
        lacks = _lacks(made, one, tokens)
        new = manager.allocate_slots(one, tokens, num_lookahead_tokens=ahead)
        assert lacks == (new is None)
        if new is not None:
            one.num_computed_tokens += tokens


@pytest.mark.parametrize("code", ["transformers", "vllm"])
def test_layers_in_the_code_of_transformers_are_told_that_weights_are_loaded(code: str) -> None:
    from kv_serve.vllm.older import _TRANSFORMERS, _loaded

    class Base(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(1, 1)
            self.attention_instances = {at: torch.nn.Identity() for at in range(2)}

    Base.__module__ = _TRANSFORMERS if code == "transformers" else "vllm.model_executor.models"
    model = type("Model", (Base,), {})()
    told: list[torch.nn.Module] = []

    def process(model: torch.nn.Module, config: str, *, target_device: str) -> None:
        assert (config, target_device) == ("config", "cpu")
        told.extend(model.modules())

    _loaded(process, model, "config", target_device="cpu")
    layers = [*model.attention_instances.values()] if code == "transformers" else []
    assert told == [model, model.inner, *layers]
