"""Requests that continue a stored prefix answer as those that read it, and hold it once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pytest

from asking import asked, pages, reset
from live_engine import OPTIONS, ends, is_empty

if TYPE_CHECKING:
    from vllm import LLM

Start = Callable[..., AbstractContextManager["LLM"]]
Greedy = Callable[["LLM", Sequence[Sequence[int]], int], list[list[int]]]
POLICIES = (
    "k8v4:window=8",  # without a selector: a page of a prefix is held once
    "k4v4:keys=channel,block=16",
    "snapkv:budget=40,window=4+k8v4",
    "kv-compress:rate=2,floor=16,short=true+k8v4",
    "leankv:window=8",
    "k8v4+quest:budget=32,sinks=0,recent=0,whole=0",
)
MARK = 90  # within a block, and behind the first chunk


@pytest.fixture(scope="module", params=POLICIES)
def engine(
    request: pytest.FixtureRequest, start: Start, tiny: Callable[..., str]
) -> Iterator["LLM"]:
    given = OPTIONS | {"additional_config": {"kv_policy": request.param, "kv_poison": True}}
    given.pop("poison")
    with start(tiny(), kv_cache_memory_bytes=600_000, **given) as running:
        yield running


def test_a_prefix_is_read_once(engine: "LLM", prompts: list[list[int]], greedy: Greedy) -> None:
    book = prompts[0][:MARK]
    questions = [book + prompts[1][i : i + 20 + 9 * i] for i in range(4)]
    cold = []
    for each in questions:
        reset(engine)
        cold += asked(engine, [each], 12, kv_prefix=MARK)
    assert [read for _, read in cold] == [0] * 4
    reset(engine)
    first, *others = [asked(engine, [each], 12, kv_prefix=MARK)[0] for each in questions]
    assert first == cold[0]
    assert [ids for ids, _ in others] == [ids for ids, _ in cold[1:]]
    assert [read for _, read in others] == [MARK] * 3
    together = asked(engine, questions, 12, kv_prefix=MARK)
    assert [ids for ids, _ in together] == [ids for ids, _ in cold]
    assert [read for _, read in together] == [MARK] * 4
    assert is_empty(engine, greedy)  # a prefix stays in free blocks
    prefix, request = pages(engine)
    assert prefix
    assert ends(engine)[1].pool.used == prefix + request
    reset(engine)
    assert is_empty(engine, greedy)
    assert pages(engine) == (0, request)
    assert ends(engine)[1].pool.used == request


def test_requests_wait_for_the_one_that_reads_their_prefix(
    engine: "LLM", prompts: list[list[int]], greedy: Greedy
) -> None:
    reset(engine)
    book = prompts[0][:MARK]
    questions = [book + prompts[1][i : i + 20] for i in range(5)]
    answers = asked(engine, questions, 8, kv_prefix=MARK)
    assert sorted(read for _, read in answers) == [0, *[MARK] * 4]
    for i, each in enumerate(questions):
        reset(engine)
        assert asked(engine, [each], 8, kv_prefix=MARK)[0][0] == answers[i][0]
    assert is_empty(engine, greedy)


def test_other_tokens_salts_and_budgets_are_other_prefixes(
    engine: "LLM", prompts: list[list[int]]
) -> None:
    reset(engine)
    from vllm import SamplingParams

    prompt = prompts[0][:110]
    asked(engine, [prompt], 2, kv_prefix=MARK)
    for other in ([*prompt[:3], 7, *prompt[4:]], [*prompt[:MARK], 5, 6, 7]):
        same = other[:MARK] == prompt[:MARK]
        assert asked(engine, [other], 2, kv_prefix=MARK)[0][1] == MARK * same
    assert asked(engine, [prompt], 2, kv_prefix=MARK - 1)[0][1] == 0
    assert asked(engine, [prompt], 2)[0][1] == 0  # it names no boundary
    given = {"prompt_token_ids": prompt, "cache_salt": "mine"}
    settings = SamplingParams(max_tokens=2, extra_args={"kv_prefix": MARK})
    for expected in (0, MARK):
        (answer,) = engine.generate([given], settings, use_tqdm=False)
        assert answer.num_cached_tokens == expected
    state, _ = ends(engine)
    if state.policy.selector is not None and "leankv" not in str(state.policy):
        for expected in (0, MARK):
            extra = {"kv_prefix": MARK, "kv_budget": 20}
            assert asked(engine, [prompt], 2, **extra)[0][1] == expected


def test_a_document_is_stored_by_a_request_for_it_alone(
    engine: "LLM", prompts: list[list[int]]
) -> None:
    reset(engine)
    book = prompts[0][:MARK]
    assert asked(engine, [book], 1, kv_prefix=MARK)[0][1] == 0
    assert asked(engine, [[*book, 9, 8]], 3, kv_prefix=MARK)[0][1] == MARK


def test_a_boundary_that_is_not_in_the_prompt_is_refused(engine: "LLM") -> None:
    from vllm.exceptions import VLLMValidationError

    for given, said in (
        (0, "kv_prefix is 0; give the number of first tokens"),
        ("book", "kv_prefix is 'book'; give the number"),
        (4, "kv_prefix is 4, but the prompt has 3 tokens; give at most as many"),
    ):
        with pytest.raises(VLLMValidationError, match=said):
            asked(engine, [[5, 6, 7]], 1, kv_prefix=given)
    assert asked(engine, [[5, 6, 7]], 2, kv_prefix=3)[0][1] == 0
