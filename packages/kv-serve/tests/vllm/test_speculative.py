"""Speculative decoding gives the tokens of decoding without it, in slots and in pages."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from asking import asked as answered
from drafting import counted, drafted_by
from kv_serve.vllm.versions import installed, minor
from live_engine import is_empty
from vllm_models import write_eagle, write_eagle3, write_next_token_heads, write_weights

if TYPE_CHECKING:
    from vllm import LLM

Start = Callable[..., AbstractContextManager["LLM"]]
Greedy = Callable[["LLM", Sequence[Sequence[int]], int], list[list[int]]]
# An answer ends inside a block: one that ends where a block does may leave it uncached.
COUNT, MORE, DRAFTS = 30, 20, 3
# One prompt waits, so that a step mixes its prefill with verification. Drafts would change where
# prompts are cut, and so the answers, if prompts did not fit into a step.
OPTIONS: dict[str, Any] = {
    **{"kv_cache_memory_bytes": 1 << 21, "max_model_len": 512, "dtype": "float32"},
    **{"skip_tokenizer_init": True, "disable_log_stats": False, "block_size": 32},
    **{"max_num_batched_tokens": 1024, "max_num_seqs": 3},
}
Answers = tuple[list[list[int]], list[list[int]]]
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": DRAFTS,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
# With a head, vLLM finds all but the last block of a prefix. What is read again would change
# answers, so this is disabled; 0.29 has no such option, and there no prefix is found.
DROPS = minor(installed() or "") == (0, 29)
WHOLE = {} if DROPS else {"disable_eagle_block_drop": True}
ALONE = {"enable_prefix_caching": False} if DROPS else {}


@pytest.fixture(scope="module")
def start_tiny(start: Start, weights: str) -> Start:
    return partial(start, weights, **OPTIONS)


@pytest.fixture(scope="module")
def asked(prompts: list[list[int]]) -> list[list[int]]:
    """Random prompts, and one that repeats itself, which is drafted for from the beginning."""
    return [prompts[2], [7, 8, 9, 10] * 12 + [7], *prompts[:2]]


@pytest.fixture(scope="module")
def told(greedy: Greedy, asked: list[list[int]]) -> Callable[["LLM"], Answers]:
    """Return an engine's answers, and one that goes on from an answer in cached blocks."""

    def answers(engine: "LLM") -> Answers:
        first = greedy(engine, asked, COUNT)
        return first, greedy(engine, [[*asked[1], *first[1]]], MORE)

    return answers


@pytest.fixture(scope="module")
def without(start_tiny: Start, told: Callable[["LLM"], Answers]) -> Callable[[str], Answers]:
    """Return the answers of a policy's engine without drafts."""
    found: dict[str, Answers] = {}

    def answers(policy: str) -> Answers:
        if policy not in found:
            with start_tiny(policy) as engine:
                found[policy] = told(engine)
        return found[policy]

    return answers


def compared(engine: "LLM", told: Callable[["LLM"], Answers], expected: Answers) -> tuple[int, int]:
    """Compare an engine's answers with those without drafts; return the drafts, as `counted`."""
    assert told(engine) == expected
    return counted(engine)


SLOW = ("hadamard+k4v4", "k8v4", "raw")
COARSE = "k4v2"  # with which an answer changes soonest if drafts attend to what is not stored
POLICIES = [COARSE, *(pytest.param(policy, marks=pytest.mark.slow) for policy in SLOW)]


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_drafted_from_the_prompt_change_nothing(
    start_tiny: Start,
    told: Callable[["LLM"], Answers],
    without: Callable[[str], Answers],
    policy: str,
) -> None:
    expected = without(policy)
    with start_tiny(policy, speculative_config=NGRAM) as engine:
        drafted, accepted = compared(engine, told, expected)
    assert 0 < accepted < drafted


@pytest.mark.parametrize("layers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_draft_model_changes_nothing(
    start_tiny: Start,
    told: Callable[["LLM"], Answers],
    without: Callable[[str], Answers],
    weights: str,
    tmp_path: Path,
    layers: int,
) -> None:
    """A draft model of another shape is mostly wrong, and the model itself mostly right."""
    model = weights
    if layers == 1:
        model = str(tmp_path)
        shape: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
        write_weights(tmp_path, num_hidden_layers=layers, **shape)
    given = {"method": "draft_model", "model": model, "num_speculative_tokens": 2}
    expected = without(COARSE)
    with start_tiny(COARSE, speculative_config=given) as engine:
        drafted, accepted = compared(engine, told, expected)
    if layers == 1:
        assert 0 < accepted < drafted / 2
    else:
        assert drafted / 2 < accepted <= drafted


# Of each kind that waits for what is right: windows, selectors, blocks, ranks of heads.
SELECTS = "snapkv:budget=24,window=8+k4v2"
PAGED = [
    SELECTS,
    "k4v2:window=12",
    *(
        pytest.param(policy, marks=pytest.mark.slow)
        for policy in (
            "k4v2:keys=channel,block=16,window=8",
            "kv-compress:budget=24,window=8+k4v2:window=4",
            "keydiff:budget=24+hadamard+k4v2",
            "d2o:budget=24,every=0+k4v2",
            "snapkv:budget=24,window=8",
        )
    ),
]


@pytest.mark.parametrize("policy", PAGED)
def test_drafts_over_pages_change_nothing(
    start_tiny: Start, greedy: Greedy, told: Callable[["LLM"], Answers], policy: str
) -> None:
    """Prompts are read in chunks, which drafts do not cut otherwise."""
    chunks = {"long_prefill_token_threshold": 48}
    with start_tiny(policy, poison=True, **chunks) as engine:
        expected = told(engine)
    with start_tiny(policy, poison=True, speculative_config=NGRAM, **chunks) as engine:
        drafted, accepted = compared(engine, told, expected)
        assert is_empty(engine, greedy)
    assert 0 < accepted < drafted


@pytest.mark.slow
def test_drafts_over_pages_beside_layers_that_vllm_keeps_change_nothing(
    start: Start, greedy: Greedy, tiny: Callable[..., str], asked: list[list[int]]
) -> None:
    more = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 48}
    folder = tiny("Gemma3ForCausalLM", "gemma3_text", **more)
    options = OPTIONS | {"load_format": "dummy", "enable_prefix_caching": False}
    with start(folder, SELECTS, poison=True, **options) as engine:
        expected = greedy(engine, asked, COUNT)
    with start(folder, SELECTS, poison=True, speculative_config=NGRAM, **options) as engine:
        assert greedy(engine, asked, COUNT) == expected
        drafted, accepted = counted(engine)
    assert 0 < accepted < drafted


def test_turns_and_prefixes_continue_after_drafts(
    start_tiny: Start, prompts: list[list[int]]
) -> None:
    """What is stored of an ended request has the drafts that were right, and no others.

    vLLM pads a step with drafts where a single token of a prompt is left after a prefix.
    """
    given = {"kv_policy": SELECTS, "kv_poison": True, "kv_turns": True}

    def talked(engine: "LLM") -> list[tuple[list[int], int]]:
        found, text = [], [7, 8, 9, 10] * 12
        for turn in ([7], [8, 9], [10, 7, 8]):
            text = text + turn
            found += answered(engine, [text], MORE)
            text = text + found[-1][0]
        book = prompts[2]
        for _ in range(2):
            both = [book, [*book[:-1], 9]]
            found += answered(engine, both, MORE, kv_prefix=len(book) - 1)
        return found

    with start_tiny(additional_config=given) as engine:
        expected = talked(engine)
    with start_tiny(additional_config=given, speculative_config=NGRAM) as engine:
        assert talked(engine) == expected
        drafted, accepted = counted(engine)
    assert 0 < accepted < drafted
    assert [read > 0 for _, read in expected][1:3] == [True, True]


def test_aborted_requests_leave_no_drafts(
    start_tiny: Start, greedy: Greedy, asked: list[list[int]]
) -> None:
    from vllm import SamplingParams

    with start_tiny(SELECTS, poison=True, speculative_config=NGRAM) as engine:
        settings = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
        for i, prompt in enumerate(asked):
            engine.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, settings)
        for _ in range(5):
            engine.llm_engine.step()
        engine.llm_engine.abort_request(["1", "2"])
        while engine.llm_engine.has_unfinished_requests():
            engine.llm_engine.step()
        assert is_empty(engine, greedy)


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("h2o:budget=24", "it observes the attention of generated queries"),
        ("kv-compress:rate=2,every=8", "it observes the attention of generated queries"),
        ("leankv:window=8", "it observes the attention of generated queries"),
        ("streaming:budget=24", "each generated token evicts or moves another"),
        ("k8v4+quest", "it reads pages as their keys rank them"),
    ],
)
def test_a_policy_that_does_more_with_a_generated_token_is_refused(
    weights: str, policy: str, why: str
) -> None:
    check_refused(weights, policy, NGRAM, f"cannot be served with speculative decoding, as {why}")


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_such_a_policy_is_refused_whoever_drafts(weights: str, method: str) -> None:
    given = {"draft_model": drafted_by(weights), "ngram": NGRAM}[method]
    check_refused(weights, "h2o:budget=24", given, "as it observes the attention of generated")


def check_refused(model: str, policy: str, drafts: dict[str, Any], reason: str) -> None:
    """Expect a sentence before an engine starts."""
    from vllm import EngineArgs

    from kv_policy import parse
    from kv_serve.vllm.config import UnservableError, check_engine

    options: dict[str, Any] = {"max_model_len": 256, "skip_tokenizer_init": True}
    made = EngineArgs(model=model, speculative_config=drafts, **options).create_engine_config()
    with pytest.raises(UnservableError, match=reason):
        check_engine(made, parse(policy))


@pytest.mark.parametrize("method", ["eagle", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_an_eagle_head_changes_nothing(
    start_tiny: Start,
    told: Callable[["LLM"], Answers],
    without: Callable[[str], Answers],
    weights: str,
    tmp_path: Path,
    method: str,
) -> None:
    """Its layer reads hidden states of the model, and stores keys and values of its own."""
    (write_eagle if method == "eagle" else write_eagle3)(Path(weights), tmp_path)
    given = {"method": method, "model": str(tmp_path), "num_speculative_tokens": 2}
    expected = without(COARSE)
    if ALONE:
        with start_tiny(COARSE, **ALONE) as engine:
            expected = told(engine)
    with start_tiny(COARSE, speculative_config=given | WHOLE, **ALONE) as engine:
        drafted, accepted = compared(engine, told, expected)
    assert 0 < accepted < drafted


@pytest.mark.slow
def test_heads_for_further_tokens_change_nothing(
    start: Start, told: Callable[["LLM"], Answers], tmp_path: Path
) -> None:
    """A layer of the model itself (MTP) drafts, beside layers of experts."""
    write_next_token_heads(tmp_path)
    made = partial(start, str(tmp_path), **OPTIONS, **ALONE)
    with made(COARSE) as engine:
        expected = told(engine)
    given = {"method": "mtp", "num_speculative_tokens": 1} | WHOLE
    with made(COARSE, speculative_config=given) as engine:
        drafted, accepted = compared(engine, told, expected)
    assert 0 < accepted < drafted
