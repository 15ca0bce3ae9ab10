"""Stored prefixes in an engine of their own: turns of a chat, little memory, and sleep."""

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest

from asking import COUNT, LARGE, arriving, asked, in_parts, pages, reset
from live_engine import OPTIONS, ends, is_empty
from sleeping import Sleeper

if TYPE_CHECKING:
    from vllm import LLM

Start = Callable[..., AbstractContextManager["LLM"]]
Greedy = Callable[["LLM", Sequence[Sequence[int]], int], list[list[int]]]


@pytest.mark.parametrize(
    "policy", ["k8v4:window=8", "snapkv:budget=24,window=8+k8v4", "kv-compress:rate=2,floor=16"]
)
def test_parts_and_turns_are_those_of_transformers(
    start: Start, weights: str, prompts: list[list[int]], policy: str
) -> None:
    given = {"kv_policy": policy, "kv_poison": True, "kv_turns": True}
    with start(weights, **LARGE, additional_config=given) as engine:
        book, question = prompts[0][:90], prompts[1][:25]
        expected = in_parts(weights, policy, [book, question], 0)[-1]
        for read in (0, 90):
            assert asked(engine, [book + question], COUNT, kv_prefix=90) == [(expected, read)]
        reset(engine)
        turns = [prompts[0][:60], prompts[1][:20], prompts[2][:15]]
        expected = in_parts(weights, policy, turns, COUNT)
        told: list[int] = []
        for turn, answer in zip(turns, expected, strict=True):
            read = max(0, len(told) - 1)
            told += turn
            assert asked(engine, [told], COUNT) == [(answer, read)]
            told += answer


def test_a_request_that_names_a_boundary_continues_no_turn(
    start: Start, weights: str, prompts: list[list[int]]
) -> None:
    given = {"kv_policy": "kv-compress:rate=2,floor=16", "kv_poison": True, "kv_turns": True}
    with start(weights, **LARGE, additional_config=given) as engine:
        book, question = prompts[0][:90], prompts[1][:25]
        ((cold, read),) = asked(engine, [book + question], COUNT, kv_prefix=90)
        assert read == 0
        reset(engine)
        asked(engine, [book[:80]], COUNT)
        ((turn, _),) = asked(engine, [book + question[:10]], COUNT)  # its state begins with both
        told = [*book, *question[:10], *turn, 7]
        assert asked(engine, [book + question], COUNT, kv_prefix=90) == [(cold, 0)]
        assert asked(engine, [told], 1)[0][1] == len(told) - 2
        assert asked(engine, [told], 1, kv_prefix=90)[0][1] == 90


def test_turns_need_prefix_caching(start: Start, tiny: Callable[..., str]) -> None:
    given = {"kv_policy": "snapkv:budget=24,window=8", "kv_turns": True}
    with (
        pytest.raises(Exception, match="kv_turns is given, but prefix caching is disabled"),
        start(
            tiny(),
            **LARGE,
            load_format="dummy",
            additional_config=given,
            enable_prefix_caching=False,
        ),
    ):
        pass


@pytest.mark.parametrize("policy", ["snapkv:budget=24,window=8", "k8v4"])
def test_a_boundary_needs_prefix_caching(
    start: Start, tiny: Callable[..., str], policy: str
) -> None:
    from vllm.exceptions import VLLMValidationError

    options = LARGE | {"load_format": "dummy", "enable_prefix_caching": False}
    with (
        start(tiny(), policy, **options) as engine,
        pytest.raises(VLLMValidationError, match="kv_prefix needs prefix caching, which is dis"),
    ):
        asked(engine, [[4, 5, 6]], 1, kv_prefix=2)


def test_vllms_prefix_cache_serves_one_format(
    start: Start, tiny: Callable[..., str], prompts: list[list[int]]
) -> None:
    options = LARGE | {"load_format": "dummy"}
    with start(tiny(), "k8v4", **options) as engine:
        asked(engine, [prompts[0]], 1, kv_prefix=64)
        assert asked(engine, [[*prompts[0][:140], 9, 8]], 1, kv_prefix=64)[0][1] >= 64


def test_an_engine_that_slept_reads_a_prefix_again(
    start: Start, weights: str, prompts: list[list[int]]
) -> None:
    sleeper, prompt = Sleeper(), prompts[0][:120]
    with sleeper.recording(), start(weights, "kv-compress:rate=2,floor=8+k8v4", **LARGE) as engine:
        (before,) = asked(engine, [prompt], COUNT, kv_prefix=90)
        assert asked(engine, [prompt], COUNT, kv_prefix=90) == [(before[0], 90)]
        sleeper.sleep_and_wake(engine)
        assert asked(engine, [prompt], COUNT, kv_prefix=90) == [before]


def test_a_small_memory_keeps_what_was_used_last(
    start: Start, tiny: Callable[..., str], prompts: list[list[int]], greedy: Greedy
) -> None:
    given = OPTIONS | {"kv_cache_memory_bytes": 90_000}
    with start(tiny(), "snapkv:budget=64,window=4+k8v4", **given) as engine:
        books = [[i + 3, *prompts[0][:60]] for i in range(40)]
        cold = []
        for each in books:
            cold += asked(engine, [[*each, 4, 5]], 6, kv_prefix=61)
        again = []
        for each in reversed(books):
            again += asked(engine, [[*each, 4, 5]], 6, kv_prefix=61)
        found = [read for _, read in again]
        assert 0 < found.count(61) < 40
        assert found[0] == 61
        assert [ids for ids, _ in again] == [ids for ids, _ in reversed(cold)]
        state, worker = ends(engine)
        assert is_empty(engine, greedy)
        prefixes = state.manager.prefixes
        assert prefixes is not None
        assert {*worker.requests.prefixes.caches} == {*prefixes.stored}
        assert worker.pool.used == sum(pages(engine))


@pytest.mark.parametrize(
    "policy", ["k8v4:window=8", "kv-compress:rate=2,floor=16,short=true+k8v4", "leankv:window=8"]
)
def test_requests_that_come_and_go_answer_as_alone(
    start: Start,
    weights: str,
    prompts: list[list[int]],
    greedy: Greedy,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt, again = Scheduler._preempt_request, set()  # these read their answers as prompts

    def preempted(self: Scheduler, request: Any, *more: Any, **how: Any) -> None:
        again.add(request.request_id.partition("-")[0])
        preempt(self, request, *more, **how)

    monkeypatch.setattr(Scheduler, "_preempt_request", preempted)
    draw = random.Random(3)
    books = [[i + 3, *prompts[0][: 40 + 23 * i]] for i in range(4)]
    options = LARGE | {"kv_cache_memory_bytes": 200_000, "max_num_batched_tokens": 4096}
    given = {"kv_policy": policy, "kv_poison": True}
    with start(weights, **options, additional_config=given) as engine:
        state, requests = ends(engine)[0], {}
        for i in range(40):
            book = draw.choice(books)
            begin = draw.randrange(60)
            prompt = book + prompts[1][begin : begin + draw.randint(1, 30)]
            requests[f"{i}"] = prompt, len(book), draw.randint(1, 30)
        answers = arriving(engine, requests, draw)
        assert len(answers) > 20
        assert is_empty(engine, greedy)
        prefixes = state.manager.prefixes
        assert prefixes is not None
        assert not prefixes.bases.keys() - {*state.requests}
        assert {*ends(engine)[1].requests.prefixes.caches} == {*prefixes.stored}
        assert again or "short" in policy
        if "short" in policy:  # what is kept depends on when blocks are short
            return
        for name in draw.sample(sorted(answers.keys() - again), 8):
            prompt, mark, count = requests[name]
            reset(engine)
            assert asked(engine, [prompt], count, kv_prefix=mark) == [(answers[name], 0)]
