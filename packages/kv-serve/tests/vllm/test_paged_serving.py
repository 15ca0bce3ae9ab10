"""Scarce memory, chunks and budgets of requests; afterwards all blocks and pages are free."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pytest

from live_engine import OPTIONS, ends, is_empty

if TYPE_CHECKING:
    from vllm import LLM

    from kv_serve.vllm.scheduler_state import SchedulerState

Start = Callable[..., AbstractContextManager["LLM"]]
Greedy = Callable[["LLM", Sequence[Sequence[int]], int], list[list[int]]]
Patterns = list[tuple[list[int], list[int]]]
COMPRESS = "kv-compress:rate=4,floor=16"
SHORT = f"{COMPRESS},short=true+k8v4"


@pytest.fixture(scope="module", params=[SHORT, "leankv:window=8"])
def small(
    request: pytest.FixtureRequest, start: Start, tiny: Callable[..., str]
) -> Iterator["LLM"]:
    """Start an engine with memory for little more than the longest request."""
    with start(tiny(), request.param, kv_cache_memory_bytes=100_000, **OPTIONS) as running:
        yield running


def test_what_waits_is_preempted_and_given_up_is_answered_and_leaves_nothing(
    small: "LLM", greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks._vllm_soak import Soak, Soaking

    state, worker = ends(small)
    happened: Counter[str] = Counter()
    note, told = type(state).note, type(state.manager).told

    def noting(self: "SchedulerState", reports: object) -> None:
        happened["short"] += reports.answered
        note(self, reports)

    def telling(*given: object) -> int:
        freed = told(*given)
        happened["freed"] += freed
        return freed

    scheduler = small.llm_engine.engine_core.engine_core.scheduler
    schedule, preempt = scheduler.schedule, scheduler._preempt_request
    ask, waits = scheduler.connector.has_pending_block_frees, False

    def scheduling(*given: object, **named: object) -> object:
        nonlocal waits
        waits = False
        return schedule(*given, **named)

    def asking() -> bool:
        nonlocal waits
        waits = ask()
        happened["waits"] += waits
        return waits

    def preempting(*given: object, **named: object) -> None:
        happened["hasty"] += waits
        preempt(*given, **named)

    monkeypatch.setattr(scheduler, "schedule", scheduling)
    monkeypatch.setattr(scheduler, "_preempt_request", preempting)
    monkeypatch.setattr(scheduler.connector, "has_pending_block_frees", asking)
    monkeypatch.setattr(type(state), "note", noting)
    monkeypatch.setattr(type(state.manager), "told", telling)
    soak = Soak(requests=16, together=8, prompt=(1, 120), answer=(1, 60), aborted=0.3)
    found = Soaking(small.llm_engine, soak, list(range(3, 256))).run()
    assert (found.leaked_blocks, found.unanswered) == (0, 0)
    assert found.answered + found.aborted == 16
    assert found.aborted > 1
    assert found.preemptions
    assert not happened["hasty"]  # one that lacks blocks waits if some are about to be free
    selector = state.policy.selector
    assert bool(happened["freed"]) == (selector.budget is not None)  # random tokens are all kept
    assert bool(happened["short"]) == bool(happened["waits"]) == selector.replan.short
    assert is_empty(small, greedy)
    assert worker.pool.used == sum(each.pages for each in worker.requests.held(kept=False).values())


@pytest.mark.parametrize("small", [SHORT], indirect=True)  # leankv has no budget
def test_budgets_of_requests_are_kept_and_a_bad_one_is_refused(small: "LLM") -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    engine, (state, _) = small.llm_engine, ends(small)
    owned = {}
    for given in (None, 48, "75%", 2**31 - 1, f"{2**31 - 1}B"):
        extra = {} if given is None else {"kv_budget": given}
        asked = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, extra_args=extra)
        name = engine.add_request(str(given), {"prompt_token_ids": [*range(3, 131)]}, asked)
        seen = []
        while engine.has_unfinished_requests():
            engine.step()
            seen.append(len(state.manager.owned(name)))
        owned[given] = [n for n in seen if n][-1]
    one = state.manager.account
    assert owned[None] < owned[48] < owned["75%"] < owned[2**31 - 1]
    assert owned[2**31 - 1] == owned[f"{2**31 - 1}B"]
    for given, kept in ((None, 32), (48, 48), ("75%", 96), (2**31 - 1, 128)):
        pages = sum(each.pages(kept) for each in one.table_rows)
        assert pages <= owned[given] * one.block_pages <= 1.6 * pages + 2 * one.block_pages
    for given, sentence in (
        ({"kv_budget": "plenty"}, "kv_budget: budget 'plenty' is not understood"),
        ({"kv_budget": 7e18}, "use at most 2147483647, or 100% to keep every token"),
        ({"kv_buget": 48}, "kv_buget is not a request argument"),
    ):
        with pytest.raises(VLLMValidationError, match=sentence):
            engine.add_request("bad", {"prompt_token_ids": [5]}, SamplingParams(extra_args=given))
    with pytest.raises(VLLMValidationError, match="needs the whole prompt in one request"):
        engine.input_processor.process_inputs(
            "piece", {"prompt_token_ids": [5]}, SamplingParams(), ("generate",), resumable=True
        )
    assert not engine.has_unfinished_requests()
