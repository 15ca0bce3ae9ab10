"""Check that the installed vLLM has the interfaces of 0.29 to 0.33 that kv-serve uses.

These interfaces are equal in all of them, except for the lines in `DIFFERENT`, and our classes
accept all forms of those. So one set of classes supports all versions.
"""

import functools
import importlib
import inspect
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any, Final

from kv_serve.vllm.versions import SERVED, installed, minor

_ATTENTION: Final = "vllm.v1.attention.backend"
_MANAGER: Final = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"
_CONNECTOR: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
_SCHEDULER: Final = "vllm.v1.core.sched.scheduler:Scheduler"
_MANAGERS: Final = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_METRICS: Final = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
_SPEC: Final = "vllm.v1.kv_cache_interface"
_REGISTRY: Final = "vllm.v1.kv_cache_spec_registry"
_LATENT: Final = "vllm.model_executor.layers.attention.mla_attention"
_CPU_LATENT: Final = "vllm.v1.attention.backends.mla.cpu_mla:CPUMLAImpl"

# vLLM calls these on our classes, so the parameters must be exactly these.
OVERRIDDEN: Final = (
    f"{_ATTENTION}:AttentionBackend.customize_spec(spec)",
    f"{_ATTENTION}:AttentionBackend.get_name()",
    f"{_ATTENTION}:AttentionBackend.get_impl_cls()",
    f"{_ATTENTION}:AttentionBackend.get_builder_cls()",
    f"{_ATTENTION}:AttentionBackend.supported_kv_cache_layouts()",
    f"{_ATTENTION}:AttentionImpl.__init__(num_heads, head_size, scale, num_kv_heads, alibi_slopes, "
    "sliding_window, kv_cache_dtype, logits_soft_cap, attn_type, kv_sharing_target_layer_name)",
    f"{_ATTENTION}:AttentionImpl.forward(layer, query, key, value, kv_cache, attn_metadata, "
    "output, output_scale, output_block_scale)",
    f"{_ATTENTION}:AttentionImpl.process_weights_after_loading(act_dtype)",
    f"{_ATTENTION}:AttentionMetadataBuilder.__init__(kv_cache_spec, layer_names, vllm_config, "
    "device)",
    f"{_ATTENTION}:AttentionMetadataBuilder.get_cudagraph_support(vllm_config, kv_cache_spec)",
    f"{_ATTENTION}:AttentionMetadataBuilder.build_for_cudagraph_capture(common_attn_metadata)",
    f"{_ATTENTION}:AttentionMetadataBuilder.build(common_prefix_len, common_attn_metadata, "
    "fast_build)",
    f"{_ATTENTION}:AttentionMetadataBuilder.build_for_drafting(common_attn_metadata, draft_index)",
    f"{_SPEC}:FullAttentionSpec.max_memory_usage_bytes(vllm_config)",
    f"{_SPEC}:FullAttentionSpec.merge(specs)",
    f"{_SPEC}:FullAttentionSpec.is_uniform_with_collection(kv_cache_specs)",
    f"{_SPEC}:FullAttentionSpec.prefix_cacheable",
    f"{_MANAGER}.__init__(kv_cache_spec, block_pool, enable_caching, kv_cache_group_id, "
    "scheduler_block_size, dcp_world_size, pcp_world_size, needs_kv_cache_zeroing, "
    "max_admission_blocks_per_request)",
    f"{_MANAGER}.allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)",
    f"{_MANAGER}.pop_blocks_for_free(request_id)",
    f"{_MANAGER}.add_local_computed_blocks(request_id, new_computed_blocks, "
    "num_local_computed_tokens, num_external_computed_tokens)",
    "vllm.v1.core.block_pool:BlockPool.reset_prefix_cache()",
    f"{_CONNECTOR}.__init__(vllm_config, role, kv_cache_config)",
    f"{_CONNECTOR}.build_connector_meta(scheduler_output)",
    f"{_CONNECTOR}.build_connector_worker_meta()",
    f"{_CONNECTOR}.get_block_ids_with_load_errors()",
    f"{_SCHEDULER}._handle_invalid_blocks(invalid_block_ids, num_scheduled_tokens)",
    f"{_SCHEDULER}._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_kv_cache_spec()",
    f"{_CONNECTOR}.reset_cache()",
    f"{_CONNECTOR}.update_connector_output(connector_output)",
    f"{_CONNECTOR}.on_new_request(request)",
    f"{_CONNECTOR}.get_num_new_matched_tokens(request, num_computed_tokens)",
    f"{_CONNECTOR}.update_state_after_alloc(request, blocks, num_external_tokens)",
    f"{_CONNECTOR}.start_load_kv(forward_context, kwargs)",
    f"{_CONNECTOR}.wait_for_layer_load(layer_name)",
    f"{_CONNECTOR}.save_kv_layer(layer_name, kv_layer, attn_metadata, kwargs)",
    f"{_CONNECTOR}.wait_for_save()",
    f"{_CONNECTOR}.requires_kv_delivery",
    f"{_CONNECTOR}.register_kv_caches(kv_caches)",
    f"{_CONNECTOR}.bind_connector_metadata(connector_metadata)",
    f"{_CONNECTOR}.get_kv_connector_stats()",
    f"{_CONNECTOR}.build_kv_connector_stats(data)",
    f"{_CONNECTOR}.build_prom_metrics(vllm_config, metric_types, labelnames, "
    "per_engine_labelvalues)",
    f"{_METRICS}:KVConnectorStats.reset()",
    f"{_METRICS}:KVConnectorStats.aggregate(other)",
    f"{_METRICS}:KVConnectorStats.reduce()",
    f"{_METRICS}:KVConnectorStats.is_empty()",
    f"{_METRICS}:KVConnectorPromMetrics.__init__(vllm_config, metric_types, labelnames, "
    "per_engine_labelvalues)",
    f"{_METRICS}:KVConnectorPromMetrics.observe(transfer_stats_data, engine_idx)",
    f"{_CONNECTOR}.request_finished(request, block_ids)",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA.request_finished_all_groups("
    "request, block_ids)",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorWorkerMetadata.aggregate(other)",
    f"{_CPU_LATENT}.forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)",
    f"{_CPU_LATENT}._compute_prefill_context(q, kv_c_and_k_pe_cache, attn_metadata, k_scale)",
    f"{_LATENT}:MLACommonMetadataBuilder.build(common_prefix_len, common_attn_metadata, "
    "fast_build)",
)

# The same where the versions differ, by the first minor version with this form.
_STORED: Final = (
    f"{_CPU_LATENT}.do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, "
    "k_scale"
)
_ALLOCATED: Final = (
    f"{_ATTENTION}:AttentionBackend.get_supported_kernel_block_sizes(kv_cache_spec)",
    f"{_MANAGER}.get_num_blocks_to_allocate(request_id, num_tokens, new_computed_blocks, "
    "total_computed_tokens, num_local_computed_tokens, num_tokens_main_model, "
    "apply_admission_cap, prefill_end)",
)
_LOADED: Final = (
    f"{_MANAGER}.allocate_external_computed_blocks(request_id, num_local_computed_tokens, "
    "num_external_computed_tokens"
)
_BEFORE_31: Final = (
    f"{_STORED})",
    f"{_LOADED})",
    f"{_ATTENTION}:AttentionBackend.get_supported_kernel_block_sizes()",
    f"{_MANAGER}.get_num_blocks_to_allocate(request_id, num_tokens, new_computed_blocks, "
    "total_computed_tokens, num_local_computed_tokens, num_tokens_main_model, "
    "apply_admission_cap)",
)
_ASKED: Final = (
    f"{_CONNECTOR}.bind_kv_cache_manager(kv_cache_manager)",
    f"{_CONNECTOR}.has_pending_block_frees()",
)
_OLDER: Final = (  # what `older` extends, calls and counts like
    f"{_SCHEDULER}.__init__(vllm_config, kv_cache_config, structured_output_manager, block_size, "
    "hash_block_size, mm_registry, include_finished_set, log_stats)",
    f"{_MANAGERS}.allocate_slots(request, num_new_tokens, "
    "num_new_computed_tokens, new_computed_blocks, num_lookahead_tokens, "
    "num_external_computed_tokens, delay_cache_blocks, num_encoder_tokens, "
    "full_sequence_must_fit, reserved_blocks, has_scheduled_reqs)",
    f"{_MANAGERS}.remove_skipped_blocks(request_id, processed_computed_tokens, num_prompt_tokens)",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.get_num_blocks_to_allocate(request_id, "
    "num_tokens, new_computed_blocks, num_encoder_tokens, total_computed_tokens, "
    "num_local_computed_tokens, num_tokens_main_model, apply_admission_cap)",
    "vllm.model_executor.model_loader.base_loader:process_weights_after_loading(model, "
    "model_config, target_device)",
)
DIFFERENT: Final = {
    (0, 29): (*_BEFORE_31, *_OLDER),
    (0, 30): (*_BEFORE_31, *_ASKED),
    (0, 31): (f"{_STORED})", f"{_LOADED})", *_ALLOCATED, *_ASKED),
    (0, 32): (f"{_STORED})", f"{_LOADED}, record_for_zeroing)", *_ALLOCATED, *_ASKED),
    (0, 33): (f"{_STORED}, skip_scale)", f"{_LOADED}, record_for_zeroing)", *_ALLOCATED, *_ASKED),
}

# We call these with these arguments; any other parameter must have a default.
CALLED: Final = (
    "vllm.v1.engine.input_processor:InputProcessor.__init__(vllm_config)",
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs(request_id, prompt, params, "
    "supported_tasks, resumable)",
    "vllm.v1.attention.backends.registry:register_backend(backend, class_path)",
    f"{_REGISTRY}:KVCacheSpecRegistry.register(kvcache_spec_cls, manager_class, "
    "uniform_type_base_spec)",
    f"{_REGISTRY}:KVCacheSpecRegistry.check_kv_cache_spec_registry(kv_cache_spec)",
    "vllm.v1.core.block_pool:BlockPool.get_new_blocks(num_blocks)",
    "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks()",
    "vllm.v1.core.block_pool:BlockPool.free_blocks(ordered_blocks)",
    "vllm.v1.core.block_pool:BlockPool.touch(blocks)",
    f"{_SPEC}:KVCacheTensor.__init__(size, layers, layer_stride, block_stride, offset)",
    f"{_SPEC}:FullAttentionSpec.__init__(block_size, num_kv_heads, head_size, head_size_v, "
    "dtype, state_content_bytes, page_size_padded)",
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase.get_kv_cache_spec("
    "vllm_config)",
    f"{_METRICS}:KVConnectorStats.__init__(data)",
    "vllm.v1.metrics.utils:create_metric_per_engine(metric, per_engine_labelvalues)",
    f"{_ATTENTION}:CommonAttentionMetadata.__init__(query_start_loc, query_start_loc_cpu, "
    "seq_lens, num_reqs, num_actual_tokens, max_query_len, max_seq_len, block_table_tensor, "
    "slot_mapping, is_prefilling)",
    f"{_LATENT}:MLACommonMetadataBuilder.__init__(kv_cache_spec, layer_names, vllm_config, device)",
    "vllm.forward_context:set_forward_context(attn_metadata, vllm_config, num_tokens, "
    "skip_compiled)",
    "vllm.config:ModelConfig.get_vocab_size()",
    "vllm.config:ModelConfig.uses_mrope",
    "vllm.config:ModelConfig.use_mla",
    "vllm.config:ModelConfig.is_hybrid",
    f"{_MANAGER}.get_num_skipped_tokens(num_computed_tokens)",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update(layer, key, "
    "value, kv_cache, slot_mapping)",
)


def check_vllm() -> None:
    """Raise if the installed vLLM is not supported, before our implementation is imported.

    Raises:
        UnservableError: its version is not supported, or an interface differs.
    """
    # config imports little of vLLM, and nothing that this checks
    from kv_serve.vllm.config import UnservableError, check_version

    found = installed() or "unknown"
    check_version(found)
    if differ := differences(found):
        raise UnservableError(
            f"this vLLM {found} differs from the supported {SERVED}: {'; '.join(differ)}. Install "
            "an unmodified one, or remove kv_policy from additional_config"
        )


@functools.cache
def differences(version: str) -> tuple[str, ...]:
    """List, as clauses, how the installed vLLM differs from the known one of this version."""
    exact = overridden(minor(version) or (0, 0))
    return (
        *(found for line in exact for found in _differs(line, exact=True)),
        *(found for line in CALLED for found in _differs(line, exact=False)),
    )


def overridden(version: tuple[int, int]) -> tuple[str, ...]:
    """List what vLLM calls on our classes, in the form of a minor version."""
    forms = [each for since, each in DIFFERENT.items() if since <= version][-1:]
    return (*OVERRIDDEN, *(line for each in forms for line in each))


def _differs(line: str, *, exact: bool) -> Iterator[str]:
    module, _, rest = line.partition(":")
    path, _, wanted = rest.partition("(")
    try:
        found = functools.reduce(inspect.getattr_static, path.split("."), _module(module))
    except (ImportError, AttributeError):
        yield f"{module} has no {path}"
        return
    if not wanted:
        if not isinstance(found, property | functools.cached_property):
            yield f"{path} is not a property"
        return
    parameters = _parameters(found)
    given = [each.name for each in parameters]
    needed = [each.name for each in parameters if each.default is each.empty]
    yield from differs(path, wanted, given, needed, exact=exact)


def differs(
    path: str, wanted: str, given: Sequence[str], needed: Sequence[str], *, exact: bool
) -> Iterator[str]:
    """Yield how the parameters of a function differ from those in a line.

    Args:
        path: the function's name in its module.
        wanted: the line's parameters, with the closing parenthesis.
        given: the function's parameters.
        needed: those without a default.
        exact: whether all must be equal; else `wanted` are the arguments of a call.
    """
    names = wanted.removesuffix(")").split(", ") if wanted != ")" else []
    right = [*given] == names if exact else {*needed} <= {*names} <= {*given}
    if not right:
        yield f"{path} takes ({', '.join(given)}), not ({', '.join(names)})"


def _module(name: str) -> object:
    return importlib.import_module(name)


def _parameters(found: object) -> list[inspect.Parameter]:
    """Return the parameters of a function, without `self` or `cls`."""
    plain = found.__func__ if isinstance(found, staticmethod | classmethod) else found
    assert callable(plain)
    parameters = list(inspect.signature(plain).parameters.values())
    bound = parameters and parameters[0].name in ("self", "cls")
    return parameters[1:] if bound else parameters


def set_up_environment() -> None:
    """Set the variables that vLLM's own command sets before it starts."""
    if _since(0, 33):
        from vllm.entrypoints.common.startup import cli_env_setup
    else:
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    cli_env_setup()


def configure_logging(arguments: Namespace) -> None:
    """Apply vLLM's logging options; before 0.31 it has none."""
    if _since(0, 31):
        from vllm.logger import configure_logging_from_args

        configure_logging_from_args(arguments)


def complete_scheduler() -> None:
    """Let the scheduler of 0.29 treat our connector as later ones do; may be called repeatedly."""
    if not _since(0, 30):
        from kv_serve.vllm import older

        older.watch()


def complete_loader() -> None:
    """Let the loader of 0.29 know all layers of a model, as later ones do; also repeatedly."""
    if not _since(0, 30):
        from kv_serve.vllm import older

        older.watch_loader()


def chunks_on_host(spec: Any) -> int:
    """Return for how many chunks of blocks a spec of offloading has memory on the host."""
    return int(spec.num_chunks if _since(0, 30) else spec.num_blocks)


@functools.cache
def indexes_requests() -> bool:
    """Return whether metadata of attention have a field for the runner's index of each request."""
    return _since(0, 30)


def _since(*version: int) -> bool:
    return (minor(installed() or "") or (0, 0)) >= version
