"""Layers that draft beside pages: a draft model and heads change no token, and free what they hold.

Their blocks are vLLM's own, of the pool that pages use, too.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asking import asked as answered
from asking import expect_consistent, stored
from drafting import counted, drafted_by
from live_engine import ends
from vllm_models import (
    write_config,
    write_eagle,
    write_eagle3,
    write_next_token_heads,
    write_weights,
)

if TYPE_CHECKING:
    from vllm import LLM

Start = Callable[..., AbstractContextManager["LLM"]]
Greedy = Callable[["LLM", Sequence[Sequence[int]], int], list[list[int]]]
COUNT, BLOCK = 30, 32
# Prompts are read in chunks that drafts do not cut otherwise, and one prompt waits.
OPTIONS: dict[str, Any] = {
    **{"kv_cache_memory_bytes": 1 << 22, "max_model_len": 512, "dtype": "float32"},
    **{"skip_tokenizer_init": True, "disable_log_stats": False, "block_size": BLOCK},
    **{"max_num_batched_tokens": 1024, "max_num_seqs": 3, "long_prefill_token_threshold": 48},
}
SELECTS = "snapkv:budget=24,window=8+k4v2:window=4"
EXACT = "snapkv:budget=4096,window=8"  # in pages, with every token as the model computes it


@pytest.fixture(scope="module")
def start_tiny(start: Start, weights: str) -> Start:
    return partial(start, weights, poison=True, **OPTIONS)


@pytest.fixture(scope="module")
def asked(prompts: list[list[int]]) -> list[list[int]]:
    """Random prompts, and one that repeats itself."""
    return [prompts[2], [7, 8, 9, 10] * 12 + [7], *prompts[:2]]


@pytest.fixture(scope="module")
def without(
    start_tiny: Start, greedy: Greedy, asked: list[list[int]]
) -> Callable[[str], list[list[int]]]:
    """Return the answers of a policy's engine without drafts."""
    found: dict[str, list[list[int]]] = {}

    def answers(policy: str) -> list[list[int]]:
        if policy not in found:
            with start_tiny(policy) as engine:
                found[policy] = greedy(engine, asked, COUNT)
        return found[policy]

    return answers


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a model of other sizes, which is mostly wrong."""
    folder = tmp_path_factory.mktemp("small")
    shape: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    write_weights(folder, num_hidden_layers=1, **shape)
    return str(folder)


def expect_all_free(engine: "LLM") -> None:
    """Assert that all blocks are free but vLLM's own and the last, after two further steps."""
    answered(engine, [[5]], 1)
    answered(engine, [[5]], 1)
    state, worker = ends(engine)
    pool = state.manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 2
    assert not {*worker.requests.prefills, *worker.requests.names} - state.known.keys()


def test_a_draft_model_that_is_mostly_wrong_changes_nothing(
    start_tiny: Start,
    greedy: Greedy,
    asked: list[list[int]],
    without: Callable[[str], list[list[int]]],
    small: str,
) -> None:
    expected = without(SELECTS)
    with start_tiny(SELECTS, speculative_config=drafted_by(small)) as engine:
        assert greedy(engine, asked, COUNT) == expected
        drafted, accepted = counted(engine)
        expect_all_free(engine)
    assert 0 < accepted < drafted / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        "k4v4:keys=channel,block=16,window=16",
        "kv-compress:budget=24,window=8+k8v4",
        "keydiff:budget=24+hadamard+k4v2",
        "zack:file={},rate=0.4",
    ],
)
def test_the_model_itself_changes_nothing_where_it_is_compressed(
    start_tiny: Start,
    greedy: Greedy,
    asked: list[list[int]],
    without: Callable[[str], list[list[int]]],
    weights: str,
    statistics: str,
    policy: str,
) -> None:
    """Uncompressed, it is right for some tokens."""
    policy = policy.format(statistics)
    expected = without(policy)
    with start_tiny(policy, speculative_config=drafted_by(weights)) as engine:
        assert greedy(engine, asked, COUNT) == expected
        drafted, accepted = counted(engine)
        expect_all_free(engine)
    assert 0 < accepted < drafted


def test_the_model_itself_is_always_right_where_tokens_are_its_own(
    start_tiny: Start, greedy: Greedy, weights: str, asked: list[list[int]]
) -> None:
    """Also of requests that were preempted: there is memory for less than two of them.

    A draft would be wrong whose layers had read a block of another group, or one that was written
    to since.
    """
    many, few = [prompt * 2 for prompt in asked], {"kv_cache_memory_bytes": 44 * 2 * BLOCK * 512}
    with start_tiny(EXACT) as engine:
        expected = greedy(engine, many, 100)
    with start_tiny(EXACT, speculative_config=drafted_by(weights), **few) as engine:
        assert greedy(engine, many, 100) == expected
        drafted, accepted = counted(engine)
        (preempted,) = (m for m in engine.get_metrics() if m.name == "vllm:num_preemptions")
        expect_all_free(engine)
    assert preempted.value > 0
    assert accepted > 0.97 * drafted


@pytest.mark.parametrize("method", ["eagle", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_a_head_is_as_often_right_as_in_vllm_alone(
    start_tiny: Start,
    greedy: Greedy,
    asked: list[list[int]],
    weights: str,
    tmp_path: Path,
    method: str,
) -> None:
    """Where tokens are the model's own; its two layers are two groups, as the head has one."""
    (write_eagle if method == "eagle" else write_eagle3)(Path(weights), tmp_path)
    drafts = {"method": method, "model": str(tmp_path), "num_speculative_tokens": 2}
    found = []
    for named in ({}, {"kv_policy": EXACT, "kv_poison": True}):
        with start_tiny(additional_config=named, speculative_config=drafts) as engine:
            found.append((greedy(engine, asked, COUNT), counted(engine)))
            if named:
                expect_all_free(engine)
    assert found[0] == found[1]
    assert 0 < found[0][1][1] < found[0][1][0]


def test_a_head_changes_nothing(
    start_tiny: Start,
    greedy: Greedy,
    asked: list[list[int]],
    without: Callable[[str], list[list[int]]],
    weights: str,
    tmp_path: Path,
) -> None:
    write_eagle(Path(weights), tmp_path)
    given = {"method": "eagle", "model": str(tmp_path), "num_speculative_tokens": 2}
    expected = without(SELECTS)
    with start_tiny(SELECTS, speculative_config=given) as engine:
        assert greedy(engine, asked, COUNT) == expected
        assert counted(engine)[0] > 0
        expect_all_free(engine)


@pytest.mark.slow
def test_heads_for_further_tokens_change_nothing(
    start: Start, greedy: Greedy, asked: list[list[int]], tmp_path: Path
) -> None:
    write_next_token_heads(tmp_path)
    made = partial(start, str(tmp_path), SELECTS, poison=True, **OPTIONS)
    with made() as engine:
        expected = greedy(engine, asked, COUNT)
    given = {"method": "mtp", "num_speculative_tokens": 1}
    with made(speculative_config=given) as engine:
        assert greedy(engine, asked, COUNT) == expected
        drafted, accepted = counted(engine)
        expect_all_free(engine)
    assert 0 < accepted < drafted


@pytest.mark.slow
def test_a_draft_model_beside_windows_changes_nothing(
    start: Start, greedy: Greedy, tiny: Callable[..., str], asked: list[list[int]], small: str
) -> None:
    more = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 48}
    folder = tiny("Gemma3ForCausalLM", "gemma3_text", **more)
    made = partial(start, folder, SELECTS, poison=True, load_format="dummy", **OPTIONS)
    with made() as engine:
        expected = greedy(engine, asked, COUNT)
    with made(speculative_config=drafted_by(small)) as engine:
        assert greedy(engine, asked, COUNT) == expected
        assert counted(engine)[0] > 0
        expect_all_free(engine)


def test_prefixes_and_turns_have_what_the_drafts_attend_to(
    start_tiny: Start, weights: str, prompts: list[list[int]]
) -> None:
    """The drafts of a request that continues them are as right as those of one that reads all.

    Answers end with a step, in which all drafts count.
    """
    given = {"kv_policy": EXACT, "kv_poison": True, "kv_turns": True}

    def talked(engine: "LLM") -> list[tuple[list[int], int]]:
        found, text = [], [7, 8, 9, 10] * 12
        for turn in ([7], [8, 9], [10, 7, 8]):
            text = text + turn
            found += answered(engine, [text], 31)
            text = text + found[-1][0]
        book, mark = prompts[2], BLOCK + 3  # in a block, and at the end of one
        for each in (mark, mark, BLOCK, BLOCK):
            found += answered(engine, [[*book[:-1], 9], book], 31, kv_prefix=each)
        return found

    with start_tiny(additional_config=given) as engine:
        expected = talked(engine)
    with start_tiny(additional_config=given, speculative_config=drafted_by(weights)) as engine:
        assert talked(engine) == expected
        drafted, accepted = counted(engine)
        assert stored(engine).other_bytes > 0
        expect_consistent(engine)
    assert [read > 0 for _, read in expected[1:3]] == [True, True]
    assert accepted > 0.97 * drafted


def test_aborted_requests_leave_nothing(
    start_tiny: Start, asked: list[list[int]], small: str
) -> None:
    from vllm import SamplingParams

    with start_tiny(SELECTS, speculative_config=drafted_by(small)) as engine:
        settings = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
        for i, prompt in enumerate(asked):
            engine.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, settings)
        for _ in range(6):
            engine.llm_engine.step()
        engine.llm_engine.abort_request(["1", "2"])
        while engine.llm_engine.has_unfinished_requests():
            engine.llm_engine.step()
        expect_all_free(engine)


# What is refused before an engine starts: options, what is set besides, and the reason.
REFUSED: list[tuple[dict[str, Any], tuple[str, str, object] | None, str]] = [
    ({}, ("device_config", "device_type", "cuda"), "on cuda, as beside pages .* on a CPU alone"),
    (
        {},
        ("scheduler_config", "async_scheduling", True),
        "and asynchronous scheduling; set async_sch",
    ),
    ({}, ("parallel_config", "tensor_parallel_size", 2), "and tensor parallelism; draft by ngram"),
    ({"additional_config": {"kv_documents": "x"}}, None, "and kv_documents, which have nothing"),
]


@pytest.mark.parametrize(("options", "change", "reason"), REFUSED)
def test_what_does_not_work_beside_layers_that_draft_is_refused(
    weights: str,
    small: str,
    options: dict[str, Any],
    change: tuple[str, str, object] | None,
    reason: str,
) -> None:
    from vllm import EngineArgs

    from kv_policy import parse
    from kv_serve.vllm.config import UnservableError, check_engine

    given = {"max_model_len": 256, "skip_tokenizer_init": True} | options
    made = EngineArgs(model=weights, speculative_config=drafted_by(small), **given)
    config = made.create_engine_config()
    if change is not None:
        part, name, value = change
        setattr(getattr(config, part), name, value)
    with pytest.raises(UnservableError, match=f"speculative decoding by draft_model {reason}"):
        check_engine(config, parse(SELECTS))


@pytest.mark.parametrize(
    ("shape", "more", "reason"),
    [
        (
            {"num_hidden_layers": 3},
            {},
            "by 3 layers beside 2 of the model, .*; draft by a model with fewer layers",
        ),
        (
            {
                **{"architecture": "Gemma3ForCausalLM", "kind": "gemma3_text"},
                **{"layer_types": ["sliding_attention"], "sliding_window": 48},
                "num_hidden_layers": 1,
            },
            {},
            r"by layers of several kinds or sizes \(SlidingWindowSpec\)",
        ),
        (
            {"num_hidden_layers": 1},
            {"disable_hybrid_kv_cache_manager": True},
            "layers draft, and snapkv.* not served beside them without vLLM's hybrid KV cache",
        ),
    ],
)
def test_drafters_of_other_kinds_are_refused(
    start_tiny: Start, tmp_path: Path, shape: dict[str, Any], more: dict[str, Any], reason: str
) -> None:
    from kv_serve.vllm.config import UnservableError

    write_config(tmp_path, torch_dtype="float32", **shape)
    drafts = drafted_by(str(tmp_path)) | {"draft_load_config": {"load_format": "dummy"}}
    with (
        pytest.raises(UnservableError, match=reason),
        start_tiny(SELECTS, speculative_config=drafts, load_format="dummy", **more),
    ):
        pass


def specs_of(drafts: int, layers: int, windows: int) -> dict[str, Any]:
    """Return specs of equal blocks: of layers that draft, and of others."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    from kv_serve.vllm.drafters import DraftSpec

    sizes: dict[str, Any] = {"block_size": 8, "num_kv_heads": 1, "head_size": 8}
    stock = FullAttentionSpec(dtype=torch.float32, **sizes)
    others = FullAttentionSpec(dtype=torch.int32, **sizes)
    window = SlidingWindowSpec(dtype=torch.float32, sliding_window=9, **sizes)
    kinds = ((DraftSpec.of(stock), drafts), (others, layers), (window, windows))
    return {f"{i}.{j}": spec for i, (spec, n) in enumerate(kinds) for j in range(n)}


@given(drafts=st.integers(1, 9), layers=st.integers(1, 9), windows=st.integers(0, 9))
def test_drafters_are_refused_where_vllm_divides_them(
    drafts: int, layers: int, windows: int
) -> None:
    import torch
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kv_serve.vllm.config import UnservableError
    from kv_serve.vllm.drafters import check_drafters

    divide = kv_cache_utils._get_kv_cache_groups_uniform_page_size
    groups = divide(specs_of(drafts, layers, windows))
    names = [{*group.layer_names} for group in groups]
    together = any(each >= {f"0.{j}" for j in range(drafts)} for each in names)
    assert not any(each & {"0.0"} and len(each) > drafts for each in names)
    stock = FullAttentionSpec(block_size=8, num_kv_heads=1, head_size=8, dtype=torch.float32)
    others = [layers, windows] if windows else [layers]
    if together:
        check_drafters([stock] * drafts, others, SELECTS)
        return
    with pytest.raises(UnservableError, match=f"by {drafts} layers beside"):
        check_drafters([stock] * drafts, others, SELECTS)


def test_layers_that_draft_share_no_block_table_with_others(
    manager_of: Callable[..., Any],
) -> None:
    """In whatever order, and with equally many tokens in a block."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

    from kv_policy import CacheShape, parse
    from kv_serve.vllm.drafters import DraftSpec

    ours = manager_of(parse(SELECTS), CacheShape(1, 1, 1, 32, 32), 20).kv_cache_spec
    size: dict[str, Any] = {"block_size": ours.block_size, "num_kv_heads": 1, "head_size": 8}
    stock = FullAttentionSpec(dtype=ours.dtype, **size)
    mine = DraftSpec.of(stock)
    assert mine == DraftSpec.merge([mine, mine])
    for first, second in ((mine, ours), (ours, mine), (mine, stock)):
        assert not UniformTypeKVCacheSpecs.is_uniform_type({"a": first, "b": second})
        with pytest.raises(AssertionError):
            type(first).merge([first, second])
    assert UniformTypeKVCacheSpecs.is_uniform_type({"a": mine, "b": mine})
    assert UniformTypeKVCacheSpecs.is_uniform_type({"a": ours, "b": ours})


def test_a_draft_model_in_another_group_than_the_first_is_refused() -> None:
    from kv_serve.vllm.config import UnservableError
    from kv_serve.vllm.drafters import check_first

    check_first({"draft.0"}, ["draft.0", "draft.1"])
    check_first(set(), ["model.0"])
    with pytest.raises(UnservableError, match="another group than its first"):
        check_first({"draft.0"}, ["model.0"])


def test_a_drafter_that_reads_keys_of_the_model_is_refused(
    start: Start, drawn: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a head of Gemma 4 does; here it is the model itself."""
    from kept_models import options
    from kv_serve.vllm import kept
    from kv_serve.vllm.config import UnservableError

    monkeypatch.setattr(kept, "is_in_pages", lambda config: True)
    model, own = drawn("gemma4_shared", weights=False), options(load_format="dummy")
    refused = pytest.raises(UnservableError, match="a layer that drafts reads the keys of")
    with refused, start(model, SELECTS, **own):
        pass
