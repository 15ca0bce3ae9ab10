"""Models with multi-head latent attention (MLA): one vector per token, in one format for all."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kv_policy import CacheShape, parse, tier_formats
from transformed import by_transformers
from vllm_models import write_config, write_weights

if TYPE_CHECKING:
    from vllm import LLM

Start = Callable[..., AbstractContextManager["LLM"]]
Greedy = Callable[["LLM", Sequence[Sequence[int]], int], list[list[int]]]
RANK, ROTATED, HEADS, LAYERS, COUNT = 512, 64, 4, 2, 24  # vLLM's kernel needs the first two
BLOCK = 16  # as vLLM has it for latents on a CPU
MODEL: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": RANK,
    "q_lora_rank": None,
    "qk_rope_head_dim": ROTATED,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": ROTATED,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 9,  # no experts: vLLM groups their ranks once in a process
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "max_position_embeddings": 1024,
    "rope_parameters": {  # vLLM's kernel for other kinds is wrong on a CPU
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
OPTIONS: dict[str, Any] = {
    "attention_backend": "CPU_MLA",  # vLLM prefers another on a CPU with AMX
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 1 << 22,
    "max_model_len": 512,
}


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tiny DeepSeek V2."""
    folder: Path = tmp_path_factory.mktemp("deepseek")
    write_weights(folder, "DeepseekV2ForCausalLM", "deepseek_v2", **MODEL)
    return str(folder)


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(3, 256, (n,), generator=draw).tolist() for n in (150, 300, 20, 211)]


@pytest.fixture(scope="module")
def stock(start: Start, greedy: Greedy, deepseek: str, asked: list[list[int]]) -> list[list[int]]:
    """Return the tokens of vLLM alone, all prompts at once."""
    with start(deepseek, **OPTIONS) as engine:
        assert engine.llm_engine.vllm_config.model_config.use_mla
        return greedy(engine, asked, COUNT)


@pytest.fixture
def in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read prompts in chunks and find prefixes, which vLLM disables for latents on a CPU."""
    from vllm.config import VllmConfig
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def checked(config: VllmConfig) -> None:
        check(config)
        config.scheduler_config.enable_chunked_prefill = True
        config.scheduler_config.max_num_batched_tokens = 100
        config.cache_config.enable_prefix_caching = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(checked))


def stored_bytes(policy: str, dtype: torch.dtype) -> int:
    """Return the bytes of a token in a layer."""
    shape = CacheShape(1, 1, HEADS, RANK + ROTATED, RANK, dtype, value_in_key=True)
    (format,) = tier_formats(parse(policy), shape)
    return format.nbytes


def test_vllm_alone_gives_the_tokens_of_transformers(
    deepseek: str, asked: list[list[int]], stock: list[list[int]]
) -> None:
    assert stock == by_transformers(deepseek, None, asked, COUNT)
    assert len({token for answer in stock for token in answer}) > COUNT


def test_uncompressed_tokens_are_those_of_vllm_alone_also_of_preempted_requests(
    start: Start, greedy: Greedy, deepseek: str, asked: list[list[int]], stock: list[list[int]]
) -> None:
    blocks = 35  # as few as vLLM allows, and less than the prompts with their answers need
    few = {"kv_cache_memory_bytes": blocks * LAYERS * BLOCK * 4 * (RANK + ROTATED)}
    with start(deepseek, "raw", disable_log_stats=False, **OPTIONS | few) as engine:
        assert greedy(engine, asked * 2, COUNT) == stock * 2
        (count,) = (each for each in engine.get_metrics() if each.name == "vllm:num_preemptions")
        assert count.value > 0
        assert engine.llm_engine.vllm_config.cache_config.num_gpu_blocks == blocks


@pytest.mark.usefixtures("in_chunks")
def test_uncompressed_tokens_are_those_of_vllm_alone_in_chunks_and_after_prefixes(
    start: Start, deepseek: str, asked: list[list[int]], stock: list[list[int]]
) -> None:
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    given = [{"prompt_token_ids": prompt} for prompt in asked]
    with start(deepseek, "raw", **OPTIONS) as engine:
        for cached in ([0] * len(asked), [(len(p) - 1) // BLOCK * BLOCK for p in asked]):
            found = engine.generate(given, settings, use_tqdm=False)
            assert [list(each.outputs[0].token_ids) for each in found] == stock
            assert [each.num_cached_tokens for each in found] == cached


@pytest.mark.parametrize("policy", ["k8v4", "k4v4"])
def test_a_coarser_format_gives_the_tokens_of_transformers(
    start: Start,
    greedy: Greedy,
    deepseek: str,
    asked: list[list[int]],
    stock: list[list[int]],
    policy: str,
) -> None:
    with start(deepseek, policy, **OPTIONS) as engine:
        found = greedy(engine, asked, COUNT)
        assert [greedy(engine, [prompt], COUNT)[0] for prompt in asked] == found
        blocks = engine.llm_engine.vllm_config.cache_config.num_gpu_blocks
    assert found == by_transformers(deepseek, policy, asked, COUNT)
    assert found != stock
    token_bytes = stored_bytes(policy, torch.float32)
    assert blocks == OPTIONS["kv_cache_memory_bytes"] // (LAYERS * BLOCK * token_bytes)


@pytest.mark.usefixtures("in_chunks")
def test_prompts_in_chunks_attend_to_what_is_stored(
    start: Start, deepseek: str, asked: list[list[int]], stock: list[list[int]]
) -> None:
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    given = [{"prompt_token_ids": prompt} for prompt in asked]
    found = []
    for policy in ("raw", "k8v4"):
        with start(deepseek, policy, **OPTIONS) as engine:
            outs = [each.outputs[0] for each in engine.generate(given, settings, use_tqdm=False)]
            found.append([{id: x.logprob for id, x in out.logprobs[0].items()} for out in outs])
    for prompt, exact, near in zip(asked, *found, strict=True):
        both = sorted(exact.keys() & near.keys())
        assert len(both) > 3
        error = max(abs(exact[id] - near[id]) for id in both)
        if len(prompt) <= 20:  # in one chunk
            assert error < 1e-4
        else:
            assert 1e-4 < error < 0.3


# The latent of 512 and the rotated key of 64 numbers are one vector with one scale, in float32.
@pytest.mark.parametrize(("policy", "nbytes"), [("raw", 1152), ("k8v4", 580), ("k4v4", 292)])
def test_a_token_takes_the_bytes_of_one_key(policy: str, nbytes: int) -> None:
    assert stored_bytes(policy, torch.bfloat16) == nbytes


@pytest.mark.slow
def test_two_workers_give_the_tokens_of_one(
    start: Start,
    greedy: Greedy,
    deepseek: str,
    asked: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each has half of the heads and all latents."""
    # vLLM would bind each worker to a NUMA node, but there may be only one.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with start(deepseek, "k8v4", tensor_parallel_size=2, **OPTIONS) as engine:
        assert greedy(engine, asked, COUNT) == by_transformers(deepseek, "k8v4", asked, COUNT)


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_tokens(
    start: Start,
    greedy: Greedy,
    deepseek: str,
    asked: list[list[int]],
    stock: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCH_COMPILE_DISABLE")
    with start(deepseek, "raw", enforce_eager=False, **OPTIONS) as engine:
        assert greedy(engine, asked, COUNT) == stock


@pytest.mark.parametrize(
    "policy", ["snapkv:budget=64", "leankv", "k4v4:keys=channel,block=16,window=16"]
)
def test_policies_with_pages_are_refused(deepseek: str, policy: str) -> None:
    from vllm import EngineArgs

    from kv_serve.vllm.config import UnservableError, check_engine

    config = EngineArgs(model=deepseek, **OPTIONS).create_engine_config()
    reason = r"cannot be served with latent attention \(MLA\), .* such as k8v4"
    with pytest.raises(UnservableError, match=reason):
        check_engine(config, parse(policy))


def test_other_devices_are_refused(deepseek: str) -> None:
    from vllm import EngineArgs

    from kv_serve.vllm.config import UnservableError, check_engine

    config = EngineArgs(model=deepseek, **OPTIONS).create_engine_config()
    check_engine(config, parse("k8v4"))
    config.device_config.device_type = "cuda"
    with pytest.raises(UnservableError, match="on a CPU alone, and this engine runs on cuda;"):
        check_engine(config, parse("k8v4"))


def test_attention_for_amx_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from kv_serve.vllm import latent
    from kv_serve.vllm.config import UnservableError

    stock = latent.AMXMLABackend.get_impl_cls()
    assert latent.AmxLatentBackend.get_impl_cls() is stock
    monkeypatch.setattr(latent, "names_policy", lambda: True)
    with pytest.raises(UnservableError, match="choose --attention-backend CPU_MLA"):
        latent.AmxLatentBackend.get_impl_cls()


def test_layers_of_other_kinds_beside_are_refused(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM runs no such model on a CPU."""
    from kv_serve.vllm import latent_slots
    from kv_serve.vllm.config import UnservableError

    write_config(tmp_path, "DeepseekV2ForCausalLM", "deepseek_v2", **MODEL)
    monkeypatch.setattr(latent_slots, "kept_specs", lambda config: {"other": None})
    with (
        pytest.raises(UnservableError, match="has layers of other kinds beside latent attention"),
        start(str(tmp_path), "k8v4", load_format="dummy", **OPTIONS),
    ):
        pass


def test_a_rotation_that_vllm_does_wrongly_is_refused(
    start: Start, greedy: Greedy, tmp_path: Path, asked: list[list[int]]
) -> None:
    from kv_serve.vllm.config import UnservableError

    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    write_weights(tmp_path, "DeepseekV2ForCausalLM", "deepseek_v2", **MODEL | plain)
    avoided = {"custom_ops": ["all", "-rotary_embedding"]}
    with start(str(tmp_path), "raw", compilation_config=avoided, **OPTIONS) as engine:
        found = greedy(engine, asked, COUNT)
    assert found == by_transformers(str(tmp_path), None, asked, COUNT)
    with (
        pytest.raises(UnservableError, match=r"rotates the vectors .* wrongly on a CPU"),
        start(str(tmp_path), "raw", **OPTIONS),
    ):
        pass


def test_metrics_count_a_latent_once_on_each_device(deepseek: str) -> None:
    from vllm import EngineArgs

    from kv_serve.vllm.plain import whole_shape

    config = EngineArgs(model=deepseek, **OPTIONS).create_engine_config()
    shape = whole_shape(config)
    assert (shape.layers, shape.kv_heads, shape.group) == (LAYERS, 1, HEADS)
    assert shape.token_bytes == LAYERS * 4 * (RANK + ROTATED)
    config.parallel_config.tensor_parallel_size = 2
    assert whole_shape(config).token_bytes == 2 * shape.token_bytes
