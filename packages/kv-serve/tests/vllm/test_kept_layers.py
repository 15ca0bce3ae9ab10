"""Models with layers that vLLM keeps: windows, chunks and states, beside layers under a policy."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kept_models import ALONE, BLOCK, options
from transformed import by_transformers

if TYPE_CHECKING:
    from vllm import LLM

    from kv_serve.vllm.spec import PagedSpec

Start = Callable[..., AbstractContextManager["LLM"]]
Greedy = Callable[["LLM", Sequence[Sequence[int]], int], list[list[int]]]
COUNT = 16
PAGES = "streaming:budget=4096"  # keeps all tokens, in pages


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    """Prompts that are several windows and chunks long, and a short one."""
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(3, 256, (n,), generator=draw).tolist() for n in (150, 700, 20, 331)]


@pytest.mark.parametrize(
    "name",
    [
        "gemma3_full",
        "gemma4_shared",
        "gpt_oss",
        "granite4",
        "llama4",
        pytest.param("gemma3", marks=pytest.mark.slow),
        pytest.param("gemma3n", marks=pytest.mark.slow),
        pytest.param("gemma4", marks=pytest.mark.slow),
        pytest.param("mistral", marks=pytest.mark.slow),
        pytest.param("olmo3", marks=pytest.mark.slow),
    ],
)
def test_uncompressed_tokens_are_those_of_vllm_alone(
    start: Start, greedy: Greedy, drawn: Callable[..., str], asked: list[list[int]], name: str
) -> None:
    found, model, own = [], drawn(name), options(**ALONE.get(name, {}))
    for policy in (None, "raw", PAGES):
        with start(model, policy, poison=policy == PAGES, **own) as engine:
            found.append([greedy(engine, asked, COUNT) for _ in range(2)])  # then with prefixes
    assert found[0] == found[1] == found[2]
    assert len({token for answer in found[0][0] for token in answer}) > COUNT


# Blocks of the windows are padded under the first format, and those of full attention under the
# second.
@pytest.mark.parametrize("policy", ["k8v4", "k4v2"])
def test_tokens_do_not_depend_on_how_blocks_are_sized(
    start: Start, greedy: Greedy, drawn: Callable[..., str], asked: list[list[int]], policy: str
) -> None:
    found, model = [], drawn("gemma3", head_dim=64)
    for alone in (False, True):
        own = options(disable_hybrid_kv_cache_manager=alone, enable_prefix_caching=False)
        with start(model, policy, **own) as engine:
            sizes = groups(engine)
            found.append(greedy(engine, asked, COUNT))
        assert (sizes == {BLOCK}) == alone
    assert found[0] == found[1]


def test_a_prefix_is_found_in_common_multiples_of_the_blocks(
    start: Start, drawn: Callable[..., str], asked: list[list[int]]
) -> None:
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with start(drawn("gemma3", weights=False), "k8v4", load_format="dummy", **options()) as engine:
        common = math.lcm(*groups(engine))
        given = [{"prompt_token_ids": prompt} for prompt in asked]
        engine.generate(given, settings, use_tqdm=False)
        again = engine.generate(given, settings, use_tqdm=False)
    assert BLOCK < common < 331
    assert [x.num_cached_tokens for x in again] == [len(p) // common * common for p in asked]


def test_requests_that_are_preempted_give_the_same_tokens(
    start: Start, greedy: Greedy, drawn: Callable[..., str], asked: list[list[int]]
) -> None:
    """With memory for two of the requests at once."""
    model, found = drawn("gemma3"), []
    for policy in (None, "raw", PAGES):
        few = options(kv_cache_memory_bytes=85 * 2 * BLOCK * 512, max_num_batched_tokens=1024)
        with start(model, policy, policy == PAGES, disable_log_stats=False, **few) as engine:
            found.append(greedy(engine, [prompt[:300] for prompt in asked] * 2, 200))
            (count,) = (m for m in engine.get_metrics() if m.name == "vllm:num_preemptions")
            assert count.value > 0
            if policy == PAGES:
                expect_all_free(engine)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("gemma3", "kv-compress:rate=4,floor=16+k8v4"),
        ("gemma4_shared", "snapkv:budget=24,window=8+k8v4"),
        ("granite4", "leankv"),
        ("gemma3", "k8v4+quest:budget=25%,sinks=0,recent=0,whole=0"),
        *(
            pytest.param(name, policy, marks=pytest.mark.slow)
            for name, policy in [
                ("gpt_oss", "snapkv:budget=24,window=8+k8v4"),
                ("llama4", "kv-compress:rate=4,floor=16+k8v4"),
                ("gemma4", "k4v4:keys=channel,block=16,window=16"),
            ]
        ),
    ],
)
def test_policies_with_pages_give_the_tokens_of_transformers(
    start: Start,
    greedy: Greedy,
    drawn: Callable[..., str],
    asked: list[list[int]],
    name: str,
    policy: str,
) -> None:
    """Pages of full attention move while blocks of other layers come and go."""
    model, own = drawn(name), options(max_num_batched_tokens=2048, **ALONE.get(name, {}))
    with start(model, policy, poison=True, **own) as engine:
        found = greedy(engine, asked, COUNT)
        assert greedy(engine, asked[::-1], COUNT) == found[::-1]
        expect_all_free(engine)
        pages = paged(engine).account.page_tokens
    assert found == by_transformers(model, policy, asked, COUNT, page_tokens=pages)


def expect_all_free(engine: "LLM") -> None:
    """Assert that all blocks are free but vLLM's own and the last, after all requests."""
    pool = engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 2


def paged(engine: "LLM") -> "PagedSpec":
    """Return the spec of the layers under the policy."""
    core = engine.llm_engine.engine_core.engine_core
    found = [group.kv_cache_spec for group in core.scheduler.kv_cache_config.kv_cache_groups]
    return next(spec for spec in found if hasattr(spec, "account"))


def groups(engine: "LLM") -> set[int]:
    """Return the tokens of a block in each group of layers."""
    core = engine.llm_engine.engine_core.engine_core
    found = core.scheduler.kv_cache_config.kv_cache_groups
    return {group.kv_cache_spec.block_size for group in found}


# A token in pages has a score and a position besides; a quarter of the tokens is kept.
@pytest.mark.parametrize(
    ("policy", "token_bytes"),
    [("k8v8", 72), ("k8v4", 56), ("kv-compress:rate=4+k8v4", (56 + 8) / 4)],
)
def test_capacity_is_that_of_compressed_layers_beside_windows_as_vllm_has_them(
    start: Start, drawn: Callable[..., str], policy: str, token_bytes: float
) -> None:
    memory, longest, step, window = 1 << 24, 1 << 15, 256, 48
    own = options(
        dtype="bfloat16",
        kv_cache_memory_bytes=memory,
        max_model_len=longest,
        max_num_batched_tokens=step,
        load_format="dummy",
    )
    with start(drawn("gemma3", weights=False), policy, **own) as engine:
        stated = engine.llm_engine.vllm_config.cache_config.kv_cache_size_tokens
    heads, stock = 2, 128
    # A window holds what a step adds, too, and rarely begins with a block.
    windows = 2 * heads * stock * BLOCK * (-(-(window - 1 + step) // BLOCK) + 1)
    request = 2 * heads * token_bytes * longest + windows
    formula = memory * longest / request
    assert 0.97 * formula <= stated <= formula


@pytest.mark.parametrize(
    ("name", "policy", "reason", "more"),
    [
        ("llama4", "k8v4", r"attend to chunks, .*; set enable_prefix_caching to false", {}),
        (
            "granite4",
            "leankv",
            r"not served beside them with prefix caching in layers with states; set enable",
            {"enable_prefix_caching": True},
        ),
        (
            "granite4",
            "snapkv:budget=64",
            "with speculative decoding in layers with states; omit the speculative_config",
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        ),
        (
            "gemma3",
            "snapkv:budget=64",
            "beside them without vLLM's hybrid KV cache manager; leave it enabled",
            {"disable_hybrid_kv_cache_manager": True},
        ),
    ],
)
def test_what_does_not_work_beside_kept_layers_is_refused(
    start: Start,
    drawn: Callable[..., str],
    name: str,
    policy: str,
    reason: str,
    more: dict[str, Any],
) -> None:
    from kv_serve.vllm.config import UnservableError

    own = options(load_format="dummy", **more)
    with (
        pytest.raises(UnservableError, match=reason),
        start(drawn(name, weights=False), policy, **own),
    ):
        pass


def test_readers_of_a_layer_before_the_last_are_refused_in_pages(
    start: Start, drawn: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No model that vLLM has today is like this."""
    from kv_serve.vllm import reader
    from kv_serve.vllm.config import UnservableError

    layers = reader.attention_layers
    monkeypatch.setattr(reader, "attention_layers", lambda config: [*layers(config), None])
    model, own = drawn("gemma4_shared", weights=False), options(load_format="dummy")
    with start(model, "k8v4", **own):
        pass
    with (
        pytest.raises(UnservableError, match="this kv_policy needs the last of these to be read"),
        start(model, "snapkv:budget=64", **own),
    ):
        pass
