"""The scheduler's side: steps, budgets, and requests that ended or restarted."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from kv_policy import Budget, CacheShape, parse

if TYPE_CHECKING:
    from kv_serve.vllm.messages import StepMetadata
    from kv_serve.vllm.scheduler_state import SchedulerState
    from kv_serve.vllm.spec import PagedManager

SHAPE = CacheShape(layers=3, kv_heads=2, group=2, key_dim=16, value_dim=16, dtype=torch.float32)
SHORT = "kv-compress:rate=2,short=true+k8v4"


@pytest.fixture
def state(manager_of: Callable[..., "PagedManager"]) -> Callable[[str], "SchedulerState"]:
    def made(text: str) -> "SchedulerState":
        from kv_serve.vllm.scheduler_state import SchedulerState

        policy = parse(text)
        return SchedulerState(policy, manager_of(policy, SHAPE, 40), 1000)

    return made


def request(name: str, tokens: int, **extra: object) -> SimpleNamespace:
    sampling = SimpleNamespace(extra_args=extra or None)
    return SimpleNamespace(
        request_id=name, num_tokens=tokens, max_tokens=100, sampling_params=sampling
    )


def step(
    state: "SchedulerState", new: bool = False, drafts: int = 0, **turns: tuple[int, int]
) -> "StepMetadata":
    """Schedule a step from tokens before it and tokens in it, and allocate their blocks.

    The last `drafts` tokens of each request are drafted.
    """
    for name, (computed, tokens) in turns.items():
        state.manager.allocate_new_blocks(name, computed + tokens, computed + tokens)
    begun = [SimpleNamespace(req_id=n, num_computed_tokens=c) for n, (c, _) in turns.items()]
    cached = SimpleNamespace(
        req_ids=[each.req_id for each in begun],
        num_computed_tokens=[each.num_computed_tokens for each in begun],
    )
    none = SimpleNamespace(req_ids=[], num_computed_tokens=[])
    return state.metadata(
        SimpleNamespace(
            scheduled_new_reqs=begun if new else [],
            scheduled_cached_reqs=none if new else cached,
            num_scheduled_tokens={name: tokens for name, (_, tokens) in turns.items()},
            scheduled_spec_decode_tokens={name: [-1] * drafts for name in turns if drafts},
        )
    )


def free(state: "SchedulerState", name: str) -> None:
    manager = state.manager
    manager.block_pool.free_blocks(reversed(manager.pop_blocks_for_free(name)))


def states(orders: "StepMetadata") -> dict[str, tuple[bool, bool, int]]:
    return {
        t.request: (t.is_prefill, t.is_partial_prefill, t.prompt) for t in orders.requests.values()
    }


def test_a_prompt_is_read_in_chunks_and_read_again_with_what_was_generated(
    state: Callable[[str], "SchedulerState"],
) -> None:
    book = state("streaming:budget=12")
    asked = request("a", 33)
    book.welcome(asked)
    orders = step(book, new=True, a=(0, 16))
    assert states(orders) == {"a": (True, True, 33)}
    assert orders.requests.keys() == {book.manager.owned("a")[0].block_id}
    assert states(step(book, a=(16, 16))) == {"a": (True, True, 33)}
    assert states(step(book, a=(32, 1))) == {"a": (True, False, 33)}  # one prompt token
    for tokens in (34, 35):
        asked.num_tokens = tokens
        assert states(step(book, a=(tokens - 1, 1))) == {"a": (False, False, 33)}
    free(book, "a")  # it is preempted, and resumed in the next step
    assert step(book).gone == ("a",)
    assert states(step(book, a=(0, 20))) == {"a": (True, True, 35)}
    assert states(step(book, a=(20, 15))) == {"a": (True, False, 35)}
    asked.num_tokens = 36
    assert states(step(book, a=(35, 1))) == {"a": (False, False, 35)}


def test_drafts_are_no_tokens_that_a_request_adds(
    state: Callable[[str], "SchedulerState"],
) -> None:
    book = state("snapkv:budget=12,window=4")
    asked = request("a", 20)
    book.welcome(asked)
    step(book, new=True, a=(0, 19))
    # One token of the prompt is left, and vLLM pads it.
    (padded,) = step(book, a=(19, 4), drafts=3).requests.values()
    assert (padded.known, padded.drafts) == (1, 3)
    assert (padded.is_prefill, padded.ends_prefill) == (True, True)
    asked.num_tokens = 21
    (one,) = step(book, a=(20, 4), drafts=3).requests.values()
    assert (one.known, one.drafts, one.is_prefill, one.refused) == (1, 3, False, None)
    (wrong,) = step(book, a=(22, 4), drafts=2).requests.values()
    assert wrong.refused is not None
    assert wrong.refused.startswith("it adds 2 prompt tokens after its answer")


def test_drafts_that_pad_a_step_do_not_end_it_at_a_boundary(
    manager_of: Callable[..., "PagedManager"],
) -> None:
    """vLLM counts on them; a boundary at the end of a prompt needs no cut."""
    from kv_serve.vllm.scheduler_state import SchedulerState

    policy = parse("snapkv:budget=12,window=4")
    book = SchedulerState(policy, manager_of(policy, SHAPE, 40), 1000, drafts=3)
    book.requests["a"] = request("a", 20)
    book.manager.prefixes = SimpleNamespace(boundaries={"a": 20})
    assert book.stop("a", 19, 4) == 4
    assert book.stop("a", 16, 4) == 4
    book.manager.prefixes.boundaries["a"] = 18
    assert book.stop("a", 16, 7) == 2
    assert book.stop("a", 18, 2) == 2


def test_a_session_that_has_more_to_read_after_its_answer_fails(
    state: Callable[[str], "SchedulerState"],
) -> None:
    book = state("streaming:budget=12")
    book.welcome(request("a", 20))
    (first,) = step(book, new=True, a=(0, 20)).requests.values()
    assert first.refused is None
    (first,) = step(book, a=(20, 7)).requests.values()
    assert first.refused is not None
    assert first.refused.startswith("it adds 7 prompt tokens after its answer")
    assert book.failed([first.serial]) == {"a"}


def test_a_failure_is_of_the_time_that_a_request_began_and_no_other(
    state: Callable[[str], "SchedulerState"],
) -> None:
    book = state("streaming:budget=12")
    for name in "ab":
        book.welcome(request(name, 20))
    old = {
        t.request: t.serial for t in step(book, new=True, a=(0, 20), b=(0, 20)).requests.values()
    }
    assert book.failed([old["a"]]) == {"a"}
    free(book, "a")
    new = {t.request: t.serial for t in step(book, a=(0, 20), b=(20, 1)).requests.values()}
    assert book.failed([old["a"]]) == set()  # it was preempted and is recomputed
    assert book.failed(new.values()) == {"a", "b"}
    assert new["b"] == old["b"]


def test_who_is_gone_is_told_once_and_forgotten(state: Callable[[str], "SchedulerState"]) -> None:
    book = state("streaming:budget=12")
    for name in "abc":
        book.welcome(request(name, 20, kv_budget=16))
    step(book, new=True, a=(0, 20), b=(0, 20))
    for name in "ac":  # c was never scheduled
        free(book, name)
        book.finished(name)
    assert step(book, b=(20, 1)).gone == ("a",)
    assert step(book, b=(21, 1)).gone == ()
    free(book, "b")
    book.finished("b")
    assert step(book).gone == ("b",)
    assert step(book).gone == ()
    assert [*book.requests, *book.budgets, *book.manager.prompts, *book.known, *book.serials] == []


def test_what_was_told_of_a_request_before_it_began_anew_is_not_heard(
    state: Callable[[str], "SchedulerState"],
) -> None:
    from kv_serve.vllm.messages import RequestPages, WorkerReport

    book = state("streaming:budget=12")
    book.welcome(request("a", 16))
    old = step(book, new=True, a=(0, 16))
    first = book.manager.owned("a")[0]
    free(book, "a")
    book.requests["a"].num_tokens = 200
    new = step(book, a=(0, 200))
    assert book.manager.owned("a")[0] is first  # the pool returns the last freed blocks first
    owned = book.manager.owned("a")
    book.note(WorkerReport(old.step, {"a": RequestPages(1, 16)}))
    assert book.manager.owned("a") == owned
    assert book.manager.blocks_for(201) == book.manager.blocks_for(200) == len(owned)
    book.note(WorkerReport(new.step, {"a": RequestPages(12, 200)}))
    assert len(book.manager.owned("a")) < len(owned)


def test_blocks_are_asked_for_until_an_answer_frees_none(
    state: Callable[[str], "SchedulerState"],
) -> None:
    from kv_serve.vllm.messages import RequestPages, WorkerReport

    book = state(SHORT)
    book.welcome(request("a", 320))
    step(book, new=True, a=(0, 320))
    asked = 0
    for pages in (90, 60, 60, 60):
        if not book.ask():
            break
        asked += 1
        orders = step(book)
        assert orders.short
        book.note(WorkerReport(orders.step, {"a": RequestPages(pages, 320)}, answered=True))
        assert not step(book).short
    assert (asked, book.ask()) == (3, False)  # the third report freed nothing, so vLLM preempts
    free(book, "a")
    step(book)
    assert book.ask()  # then compression may be requested again


def test_blocks_are_not_asked_for_again_before_a_report(
    state: Callable[[str], "SchedulerState"],
) -> None:
    from kv_serve.vllm.messages import WorkerReport

    book = state(SHORT)
    book.welcome(request("a", 320))
    before = step(book, new=True, a=(0, 320))
    assert book.ask()
    orders = step(book)
    assert orders.short
    book.note(WorkerReport(before.step))  # which is late
    for _ in range(2):
        assert book.ask()  # vLLM waits
        assert not step(book).short
    book.note(WorkerReport(orders.step, answered=True))
    assert not book.ask()


@pytest.mark.parametrize("text", ["kv-compress:rate=2+k8v4", "k8v4:window=8"])
def test_who_has_nothing_to_compress_is_not_asked(
    state: Callable[[str], "SchedulerState"], text: str
) -> None:
    book = state(text)
    assert not book.ask()
    assert not step(book).short


def test_reports_of_several_workers_say_what_most_of_them_need() -> None:
    from kv_serve.vllm.messages import RequestPages, WorkerReport

    one = WorkerReport(7, {"a": RequestPages(5, 20), "b": RequestPages(9, 30)})
    two = WorkerReport(
        7,
        {"a": RequestPages(6, 20), "b": RequestPages(8, 30), "c": RequestPages(1, 2)},
        answered=True,
    )
    told = {"a": RequestPages(6, 20), "b": RequestPages(9, 30), "c": RequestPages(1, 2)}
    assert one.aggregate(two) == two.aggregate(one) == WorkerReport(7, told, answered=True)


def test_a_bad_budget_is_logged_and_its_request_fails(
    state: Callable[[str], "SchedulerState"],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    book = state("snapkv:budget=64,window=16")
    for name, given in (("a", 32), ("b", "25%"), ("c", "plenty"), ("d", 3)):
        book.welcome(request(name, 20, kv_budget=given))
    book.welcome(SimpleNamespace(request_id="pooling", num_tokens=9, sampling_params=None))
    assert book.budgets == {"a": Budget(32), "b": Budget(25, "percent")}
    # Which loggers propagate depends on vLLM's earlier configuration.
    said = list(dict.fromkeys(record.getMessage() for record in caplog.records))
    assert len(said) == 2
    assert "request c fails, as it cannot be served: kv_budget: budget 'plenty'" in said[0]
    assert "request d fails, as it cannot be served: a budget of 3 tokens" in said[1]
    orders = step(book, new=True, a=(0, 20), c=(0, 20))
    assert [step.budget for step in orders.requests.values()] == [Budget(32), None]
    assert [step.refused is None for step in orders.requests.values()] == [True, False]
    book.finished("c")
    assert book.refused.keys() == {"d"}


def test_a_request_may_ask_for_what_fits_the_engine_while_its_prompt_is_read(
    state: Callable[[str], "SchedulerState"],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    book = state("streaming:budget=64,chunks=true")  # 40 blocks of 16 tokens
    for name, tokens, given in (("a", 5000, 32), ("b", 500, 10**6), ("c", 5000, 10**6)):
        book.welcome(request(name, tokens, kv_budget=given))
    book.welcome(request("d", 5000))
    # The third would be preempted forever, and is admitted by the policy's own budget to fail.
    assert book.manager.kept == {"a": 32, "b": 10**6, "c": 64, "d": 64}
    assert book.refused.keys() == {"c"}
    assert "a request of 1000 tokens takes 63 blocks for a budget of 1000000 tokens" in caplog.text
    book.finished("a")
    assert "a" not in book.manager.kept
    book.welcome(request("e", 500, kv_budget="25%"))
    assert "plans after each chunk of a prompt" in book.refused["e"]


@pytest.mark.parametrize(
    ("text", "longest", "warned"),
    [
        ("kv-compress:rate=4+k8v4", 64, True),  # never fewer than 128
        ("kv-compress:rate=4+k8v4", 400, False),
        ("snapkv:budget=64,window=16", 64, True),
        ("snapkv:budget=64,window=16", 65, False),
        ("leankv:window=8", 64, False),  # has no budget
    ],
)
def test_a_policy_that_can_drop_nothing_is_warned_of_at_the_start(
    manager_of: Callable[..., "PagedManager"],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    longest: int,
    warned: bool,
) -> None:
    from kv_serve.vllm.scheduler_state import SchedulerState

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.WARNING, "vllm")  # what vLLM's server imports may have raised it
    policy = parse(text)
    coordinator = SimpleNamespace(single_type_managers=[manager_of(policy, SHAPE, 400)])
    managers = SimpleNamespace(coordinator=coordinator, enable_caching=False)
    SchedulerState.over(policy, managers, longest)
    said = [record.getMessage() for record in caplog.records]
    assert any(
        f"keeps every token of a request of max_model_len, {longest}" in x for x in said
    ) == (warned)
