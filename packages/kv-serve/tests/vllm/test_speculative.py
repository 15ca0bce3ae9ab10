"""Speculative decoding under one format for all tokens gives the tokens of decoding without it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

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


def counted(engine: "LLM") -> tuple[int, int]:
    """Return the tokens that were drafted, and those accepted."""
    found = {each.name: getattr(each, "value", None) for each in engine.get_metrics()}
    names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    drafted, accepted = (int(found[name] or 0) for name in names)
    return drafted, accepted


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


def test_a_policy_in_pages_is_refused(start_tiny: Start) -> None:
    from kv_serve.vllm.config import UnservableError

    reason = "kv-compress.* cannot be served with speculative decoding; use one format"
    with (
        pytest.raises(UnservableError, match=reason),
        start_tiny("kv-compress:rate=2+k8v4", speculative_config=NGRAM),
    ):
        pass


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
    given |= {"disable_eagle_block_drop": True}  # as what is read again would change answers
    expected = without(COARSE)
    with start_tiny(COARSE, speculative_config=given) as engine:
        drafted, accepted = compared(engine, told, expected)
    assert 0 < accepted < drafted


@pytest.mark.slow
def test_heads_for_further_tokens_change_nothing(
    start: Start, told: Callable[["LLM"], Answers], tmp_path: Path
) -> None:
    """A layer of the model itself (MTP) drafts, beside layers of experts."""
    write_next_token_heads(tmp_path)
    made = partial(start, str(tmp_path), **OPTIONS)
    with made(COARSE) as engine:
        expected = told(engine)
    given = {"method": "mtp", "num_speculative_tokens": 1, "disable_eagle_block_drop": True}
    with made(COARSE, speculative_config=given) as engine:
        drafted, accepted = compared(engine, told, expected)
    assert 0 < accepted < drafted
