"""Connectors of vLLM bring back what they took, under one format for all tokens."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from vllm import LLM

Start = Callable[..., AbstractContextManager["LLM"]]
Settings = dict[str, Any]
BLOCK, COUNT, CHUNK = 16, 24, 3  # tokens of a block, tokens of an answer, blocks of a chunk
HOST_BYTES = 1 << 22
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
HOST: Settings = {"spec_name": "HostSpec", "spec_module_path": "kv_serve.vllm.offload"}


def offloading(**more: object) -> Settings:
    """Return the options of an engine that offloads blocks."""
    extra = {"cpu_bytes_to_use": HOST_BYTES, **HOST, **more}
    return transfer("OffloadingConnector", **extra)


def storing(folder: Path, **more: object) -> Settings:
    """Return the options of an engine that saves prompts in files."""
    asked = transfer("ExampleConnector", shared_storage_path=str(folder), **more)
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": 512} | asked


def transfer(name: str, **extra: object) -> Settings:
    given = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return {"kv_transfer_config": given}


@pytest.fixture(scope="module")
def start_tiny(start: Start, weights: str) -> Start:
    small = {"kv_cache_memory_bytes": 1 << 20, "max_model_len": 256, "dtype": "float32"}
    return partial(start, weights, skip_tokenizer_init=True, block_size=BLOCK, **small)


@pytest.fixture(scope="module")
def asked(prompts: list[list[int]]) -> list[list[int]]:
    """Return prompts whose full blocks are full chunks, too."""
    return [prompts[0], prompts[1][:110], prompts[1][60:120]]


def answers(engine: "LLM", prompts: Sequence[list[int]]) -> list[tuple[list[int], int]]:
    """Return the tokens of each answer, and how many of the prompt were cached."""
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = engine.generate(asked, settings, use_tqdm=False)
    return [(list(each.outputs[0].token_ids), each.num_cached_tokens) for each in found]


def layers(engine: "LLM") -> list[Any]:
    from kv_serve.vllm.shape import attention_layers

    return attention_layers(engine.llm_engine.vllm_config)


def blocks(engine: "LLM") -> list[set[bytes]]:
    """Return the bytes of every block, by layer."""
    found = []
    for layer in layers(engine):
        assert layer.kv_cache.is_contiguous()
        found.append({each.numpy().tobytes() for each in layer.kv_cache})
    return found


@pytest.mark.parametrize(("name", "policy"), [("offloaded", "k8v4"), ("stored", "hadamard+k4v4")])
def test_evicted_prefixes_come_back_byte_for_byte_and_give_the_same_tokens(
    start_tiny: Start, asked: list[list[int]], tmp_path: Path, policy: str, name: str
) -> None:
    options = offloading(blocks_per_chunk=CHUNK) if name == "offloaded" else storing(tmp_path)
    with start_tiny(policy, **options) as engine:
        answers(engine, asked)
        answers(engine, [[5, 6, 7]])  # blocks are copied in a later step
        cached = answers(engine, asked)  # in the engine's own memory
        before = blocks(engine)
        assert engine.reset_prefix_cache()
        for layer in layers(engine):
            layer.kv_cache.fill_(255)
        restored = answers(engine, asked)
        after = blocks(engine)
    assert [count for _, count in restored] == [144, 96, 48]
    assert restored == cached
    full = (144 + 96 + 48) // BLOCK
    assert all(len(old & new) >= full for old, new in zip(before, after, strict=True))


def test_memory_of_the_host_holds_more_tokens_by_as_much_as_a_slot_is_smaller(
    start_tiny: Start,
) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    tokens = {}
    for policy in (None, "k8v4"):
        # Stock attention needs larger blocks. A chunk is a multiple of the host's pages.
        given = offloading(blocks_per_chunk=16) | {"dtype": "bfloat16", "block_size": 32}
        with start_tiny(policy, **given):
            chunks, count, _ = get_kv_transfer_group().connector_worker.worker.held[0].shape
            tokens[policy] = chunks * count * 32
    slots = 2 * 2 * 2 * 32 * 2, 2 * 2 * (32 + 16 + 8)  # bytes, in two layers of two heads
    assert tokens[None] == HOST_BYTES // (512 * slots[0]) * 512
    assert tokens["k8v4"] == HOST_BYTES // (512 * slots[1]) * 512


@pytest.mark.slow
def test_prefixes_are_offloaded_beside_drafts(start_tiny: Start, asked: list[list[int]]) -> None:
    with start_tiny("k8v4", speculative_config=NGRAM, **offloading()) as engine:
        answers(engine, asked)
        answers(engine, [[5, 6, 7]])
        cached = answers(engine, asked)
        assert engine.reset_prefix_cache()
        assert answers(engine, asked) == cached


CASES: list[tuple[str, Settings, str]] = [
    ("k8v4", transfer("NixlConnector"), "NixlConnector; use vLLM's OffloadingConnector or Examp"),
    ("k8v4", transfer("OffloadingConnector", cpu_bytes_to_use=1), "CPUOffloadingSpec, with which"),
    ("k8v4", transfer("ExampleConnector"), "prompts in chunks, as it saves a prompt in its first"),
    (
        "k8v4",
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 512}
        | transfer("ExampleConnector"),
        "in its default folder; give an empty folder as shared_storage_path",
    ),
    (
        "snapkv",
        transfer("OffloadingConnector", cpu_bytes_to_use=1, **HOST),
        "OffloadingConnector; use one format for all tokens, such as k8v4",
    ),
    ("snapkv", transfer("MultiConnector", connectors=[]), "MultiConnector; use one format"),
]


@pytest.mark.parametrize(("policy", "options", "reason"), CASES)
def test_other_connectors_are_refused_with_what_is_supported(
    weights: str, policy: str, options: Settings, reason: str
) -> None:
    from vllm import EngineArgs

    from kv_policy import parse
    from kv_serve.vllm.config import UnservableError, check_engine

    small = {"skip_tokenizer_init": True, "max_model_len": 256}
    config = EngineArgs(model=weights, **small, **options).create_engine_config()
    with pytest.raises(UnservableError, match=f"cannot be served with the KV connector .*{reason}"):
        check_engine(config, parse(policy))


def test_a_folder_has_what_one_policy_stored_of_one_model(
    start_tiny: Start, asked: list[list[int]], tmp_path: Path
) -> None:
    """Files are named by tokens alone, and formats of equal sizes could read each other's."""
    from kv_serve.vllm.config import UnservableError

    with start_tiny("k8v4", **storing(tmp_path)) as engine:
        answers(engine, asked[:1])
    with start_tiny("k8v4", **storing(tmp_path)) as engine:  # what was stored outlives an engine
        assert answers(engine, asked[:1])[0][1] > 0
    with (
        pytest.raises(UnservableError, match="which has keys and values that another policy or m"),
        start_tiny("hadamard+k8v4", **storing(tmp_path)),
    ):
        pass
    (tmp_path / "kv_policy.txt").unlink()  # as if an engine without a policy had stored them
    with (
        pytest.raises(UnservableError, match="give an empty folder as shared_storage_path"),
        start_tiny("k8v4", **storing(tmp_path)),
    ):
        pass
