"""CUDA graphs of decode steps under policies with pages."""

from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport

from kv_runtime import Layout, captures_pages, fixed_bytes
from kv_serve.vllm import slots
from kv_serve.vllm.connector import PageLayer, PagesConnector
from kv_serve.vllm.extending import extend
from kv_serve.vllm.shape import attention_layers
from kv_serve.vllm.spec import PagedSpec

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

logger = init_logger("vllm.kv_serve")

MOST: Final = 1 / 32  # of the device's memory, for the page tables of all requests


def support(config: VllmConfig, spec: PagedSpec) -> AttentionCGSupport:
    """Return that decode steps can be captured, if kernels for GPUs compute all of them.

    vLLM's former model runner is not supported: it would run prompts of one token in such graphs.
    """
    device = torch.device(config.device_config.device_type)
    if device.type not in slots.CAPTURING or not getattr(config, "use_v2_model_runner", False):
        return AttentionCGSupport.NEVER
    if config.speculative_config is not None:  # a graph would have several tokens of a request
        return AttentionCGSupport.NEVER
    if config.parallel_config.use_ubatching:  # a step's layers are called twice
        return AttentionCGSupport.NEVER
    layers, layout = attention_layers(config), layout_of(config, spec)
    backend = layers[0].attn_backend
    for layer in (each.impl.layer for each in layers):
        assert isinstance(layer, PageLayer), "BilledPages has PageLayer layers"
        options = backend.serving.backend, device, layer.softcap, layer.sinks
        if not captures_pages(backend.storage.policy, layout, *options):
            return AttentionCGSupport.NEVER
    tables, _ = memory_of(config, layout)
    if tables > MOST * current_platform.get_device_total_memory():
        logger.info(
            "decode steps are not captured in CUDA graphs: page tables of max_num_seqs requests of "
            "max_model_len tokens take %d bytes; reduce one of both",
            tables,
        )
        return AttentionCGSupport.NEVER
    if not keep_prompts_out():
        return AttentionCGSupport.NEVER
    return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


def layout_of(config: VllmConfig, spec: PagedSpec) -> Layout:
    """Return the pages of a worker."""
    found: Layout = attention_layers(config)[0].attn_backend.storage.layout(
        spec.account.page_tokens
    )
    return found


def memory_of(config: VllmConfig, layout: Layout) -> tuple[int, int]:
    """Return the bytes of page tables of all requests, and of what a captured step keeps."""
    requests = config.scheduler_config.max_num_seqs
    return fixed_bytes(layout, requests, config.model_config.max_model_len)


def keep_prompts_out() -> bool:
    """Make vLLM run prompts outside of graphs of decode steps; may be called repeatedly.

    vLLM runs the last chunk of a prompt as a decode step if it has one token. A policy plans there,
    which is not in the graph. With our connector a step with a prompt is no decode step.

    Returns:
        Whether this version of vLLM allows it.
    """
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    gather = getattr(GPUModelRunner, "gather_batch_req_state", None)
    known = ["self", "scheduler_output", "dummy_run"]
    if gather is None or [*signature(gather).parameters] != known:
        return False
    extend(GPUModelRunner, "gather_batch_req_state", _gathered)
    return True


def _gathered(
    gather: Callable[["GPUModelRunner", "SchedulerOutput", bool], tuple[Any, int | None]],
    self: "GPUModelRunner",
    scheduler_output: "SchedulerOutput",
    dummy_run: bool,
) -> tuple[Any, int | None]:
    state, uniform = gather(self, scheduler_output, dummy_run)
    ours = has_kv_transfer_group() and isinstance(get_kv_transfer_group(), PagesConnector)
    prompts = ours and state is not None and state.has_prefill
    return state, None if prompts else uniform
