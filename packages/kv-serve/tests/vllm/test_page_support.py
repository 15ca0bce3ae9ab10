"""Where decode steps over pages are captured in CUDA graphs."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from kv_policy import CacheShape, parse
from kv_runtime import Layout

SHAPE = CacheShape(2, 2, 2, 8, 8, torch.float32)
POLICY = parse("snapkv:budget=64+k8v4")
LAYOUT = Layout.of(POLICY, SHAPE, None, 16)
TABLES = 4 * 8 * 2 * 2 * (100 // LAYOUT.pages[0][0].tokens + 2)  # bytes


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine for which they are captured."""
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from kv_serve.vllm import page_graphs, slots
    from kv_serve.vllm.connector import PageLayer

    storage = SimpleNamespace(policy=POLICY, layout=lambda tokens: LAYOUT)
    layer = SimpleNamespace(impl=SimpleNamespace(layer=PageLayer(0)))
    layer.attn_backend = SimpleNamespace(storage=storage, serving=SimpleNamespace(backend="triton"))
    monkeypatch.setattr(page_graphs, "attention_layers", lambda config: [layer])
    monkeypatch.setattr(page_graphs, "captures_pages", lambda *given: given[2] == "triton")
    memory = MagicMock(return_value=32 * TABLES)
    monkeypatch.setattr(page_graphs.current_platform, "get_device_total_memory", memory)
    monkeypatch.setattr(slots, "CAPTURING", frozenset({"meta"}))
    gather = GPUModelRunner.gather_batch_req_state
    monkeypatch.setattr(GPUModelRunner, "gather_batch_req_state", gather)  # undone at the end
    made = MagicMock(spec=VllmConfig)
    made.device_config = SimpleNamespace(device_type="meta")
    made.use_v2_model_runner = True
    made.parallel_config = SimpleNamespace(use_ubatching=False)
    made.scheduler_config = SimpleNamespace(max_num_seqs=8)
    made.speculative_config = None
    made.model_config = SimpleNamespace(max_model_len=100)
    made.layer, made.memory = layer, memory
    return made


def found(config: Any) -> str:
    from kv_serve.vllm.rows import RowsBuilder
    from kv_serve.vllm.spec import PagedSpec

    spec = MagicMock(spec=PagedSpec)
    spec.account = SimpleNamespace(page_tokens=16)
    return RowsBuilder.get_cudagraph_support(config, spec).name


def test_decode_steps_are_captured_on_a_gpu(config: Any) -> None:
    assert found(config) == "UNIFORM_SINGLE_TOKEN_DECODE"


@pytest.mark.parametrize(
    "wrong", ["device", "runner", "drafts", "halves", "torch", "memory", "other"]
)
def test_nothing_is_captured_elsewhere(
    config: Any, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    if wrong == "device":
        config.device_config.device_type = "cpu"
    elif wrong == "runner":
        config.use_v2_model_runner = False
    elif wrong == "drafts":
        config.speculative_config = SimpleNamespace(num_speculative_tokens=2)
    elif wrong == "halves":
        config.parallel_config.use_ubatching = True
    elif wrong == "torch":
        config.layer.attn_backend.serving.backend = "torch"
    elif wrong == "memory":  # less than 32 times what page tables take
        config.memory.return_value = 32 * TABLES - 64
    else:
        monkeypatch.setattr(GPUModelRunner, "gather_batch_req_state", lambda self, other: None)
    assert found(config) == "NEVER"


def test_a_step_with_a_prompt_is_no_decode_step_with_our_connector(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from kv_serve.vllm import page_graphs
    from kv_serve.vllm.connector import PagesConnector

    def gather(self: object, scheduler_output: object, dummy_run: bool) -> tuple[object, int]:
        return scheduler_output, 1

    monkeypatch.setattr(GPUModelRunner, "gather_batch_req_state", gather)
    assert page_graphs.keep_prompts_out()
    assert page_graphs.keep_prompts_out()  # again: it is wrapped once
    gathered = GPUModelRunner.gather_batch_req_state
    assert gathered.__wrapped__ is gather
    prompts, decode = SimpleNamespace(has_prefill=True), SimpleNamespace(has_prefill=False)
    for connector, wanted in ((object.__new__(PagesConnector), None), (object(), 1)):
        monkeypatch.setattr(page_graphs, "has_kv_transfer_group", lambda: True)
        monkeypatch.setattr(page_graphs, "get_kv_transfer_group", lambda each=connector: each)
        assert gathered(None, prompts, False) == (prompts, wanted)
        assert gathered(None, decode, False) == (decode, 1)
        assert gathered(None, None, True) == (None, 1)
