"""A script: engines with vLLM's GPU model runner on a CPU, its kernels in Triton's interpreter.

It takes options as JSON, and writes what it found as JSON.
"""

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CAPTURED = [1, 4]  # tokens of captured decode steps
STOCK = frozenset({"cuda"})  # devices whose decode steps are captured


class _Driver:
    """Stands in for Triton's driver of a CPU, which vLLM asks for."""

    @staticmethod
    def is_active() -> bool:
        return True


def before_requests(worker: Any) -> None:
    """Run the model as vLLM does on a GPU before the first request.

    That is on made-up tokens: profiling with captured graphs, before a connector exists; dummy
    runs and warm-up, while it is disabled; and capture.
    """
    import torch
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.forward_context import set_forward_context
    from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture
    from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup

    runner = worker.model_runner

    def capture() -> None:
        buffers, count = runner.input_buffers, 8
        groups = (runner.block_tables, runner.attn_groups, runner.kv_cache_config)
        given = prepare_inputs_to_capture(
            4, count, runner.model_state, buffers, *groups, full_cudagraph=False
        )
        metadata, slots = given
        with (
            torch.inference_mode(),
            set_forward_context(metadata, runner.vllm_config, num_tokens=count, slot_mapping=slots),
        ):
            runner.model(
                input_ids=buffers.input_ids[:count],
                positions=buffers.positions[:count],
                intermediate_tensors=None,
                inputs_embeds=None,
            )

    connector = kv_transfer_state._KV_CONNECTOR_AGENT
    kv_transfer_state._KV_CONNECTOR_AGENT = None
    capture()
    kv_transfer_state._KV_CONNECTOR_AGENT = connector
    runner._dummy_run(16, skip_eplb=True)
    capture()
    # All of vLLM's warm-up needs kernels for sampling and grammars that the interpreter cannot run.
    assert run_mixed_prefill_decode_warmup(
        runner, worker.execute_model, worker.sample_tokens, num_tokens=16
    )


def configure(graphs: str | None) -> None:
    """Let vLLM schedule and, in a mode, capture graphs as it does on a GPU."""
    import vllm.v1.worker.gpu.cudagraph_utils as cudagraphs
    from vllm.config.compilation import CUDAGraphMode
    from vllm.platforms.cpu import CpuPlatform

    import kv_serve.vllm.slots
    from launches import Graph

    check = CpuPlatform.check_and_update_config.__func__
    check = getattr(check, "stock", check)

    def configured(cls: type[CpuPlatform], config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = graphs is not None
        if graphs is not None:
            compilation = config.compilation_config
            compilation.cudagraph_mode = CUDAGraphMode[graphs]
            compilation.cudagraph_capture_sizes = CAPTURED
            compilation.max_cudagraph_capture_size = max(CAPTURED)

    def capture(self: Any, create: Any, progress_bar_desc: str = "") -> None:
        for batch in self._capture_descs.get(CUDAGraphMode.FULL, ()):
            create(batch, warmup=True)(CUDAGraphMode.NONE)
            forward, self.graphs[batch] = create(batch, warmup=False), Graph()
            with self.graphs[batch].capture():
                forward(CUDAGraphMode.NONE)
        self._graphs_captured = True

    configured.stock = check
    CpuPlatform.check_and_update_config = classmethod(configured)
    CpuPlatform.get_global_graph_pool = lambda self: None
    cudagraphs.CudaGraphManager.capture = capture
    kv_serve.vllm.slots.CAPTURING = STOCK if graphs is None else frozenset({"cpu"})


def capture_graphs(engine: Any, runner: Any) -> list[int]:
    """Capture graphs as vLLM does on a GPU; return a list that grows by the tokens of a replay."""
    layers = engine.llm_engine.vllm_config.compilation_config.static_forward_context
    for layer in layers.values():
        layer.use_direct_call = True  # else our Python is one operation of torch
    manager = runner.cudagraph_manager
    manager.capture(
        runner.model,
        runner.model_state,
        runner.input_buffers,
        runner.intermediate_tensors,
        runner.block_tables,
        runner.attn_groups,
        runner.kv_cache_config,
    )
    replayed: list[int] = []
    run = manager.run_fullgraph

    def counted(batch: Any) -> Any:
        replayed.append(batch.num_tokens)
        return run(batch)

    manager.run_fullgraph = counted
    return replayed


def watch(runner: Any) -> Any:
    """Repeat every step's metadata where nothing can be read."""
    from shadow import Shadow

    shadow = Shadow()
    for groups in runner.attn_groups:
        for group in groups:
            shadow.watch(group.get_metadata_builder(0))
    return shadow


def answers(engine: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Generate greedily."""
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": each} for each in prompts]
    found = engine.generate(given, settings, use_tqdm=False)
    return [[*each.outputs[0].token_ids] for each in found]


def told(asked: dict[str, Any], v2: bool) -> dict[str, object]:
    """Start an engine, let it answer the prompts twice, and return what is seen of it."""
    from vllm import LLM

    configure(asked["graphs"])
    engine = LLM(**asked["options"], additional_config=asked["settings"])
    worker = engine.llm_engine.model_executor.driver_worker.worker
    if v2:
        before_requests(worker)
    config = engine.llm_engine.vllm_config
    replayed = capture_graphs(engine, worker.model_runner) if asked["graphs"] else []
    shadow = watch(worker.model_runner) if asked["watch"] else None
    layers = config.compilation_config.static_forward_context
    found: dict[str, object] = {
        "scheduler": type(engine.llm_engine.engine_core.engine_core.scheduler).__name__,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "replayed": replayed,
        "runner": [kind.__module__ for kind in type(worker.model_runner).__mro__],
        "backend": [each.attn_backend.serving.backend for each in layers.values()],
        "answers": [answers(engine, asked["prompts"], asked["count"]) for _ in range(2)],
    }
    if shadow is not None:
        found["steps"] = shadow.steps
    engine.llm_engine.engine_core.shutdown()
    return found


def name_vllm() -> None:
    """Give vLLM its own version: before 0.32 the build for CPUs looks for another's, and stops."""
    from importlib import metadata

    from kv_serve.vllm.versions import installed

    own = metadata.version
    metadata.version = lambda name: f"{installed()}+cpu" if name == "vllm" else own(name)


def main() -> None:
    """Start the engines one after the other."""
    asked = json.loads(sys.argv[1])
    os.environ |= asked["environment"]
    sys.path.extend(asked["support"])
    from interpreted import map_once

    map_once()
    if asked["v2"]:
        import triton.backends

        name_vllm()
        triton.backends.backends["cpu"] = SimpleNamespace(driver=_Driver, compiler=None)
    import vllm.entrypoints.llm  # noqa: F401

    gc.unfreeze = lambda: None  # vLLM calls it after an engine
    found: dict[str, dict[str, object]] = {}
    for name, given in asked["engines"].items():
        gc.collect()
        gc.freeze()  # as vLLM collects ten times for an engine, which is over all modules otherwise
        try:
            found[name] = told(given, asked["v2"])
        except Exception:
            found[name] = {"error": traceback.format_exc()}
    Path(asked["target"]).write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # what vLLM leaves behind does not matter


if __name__ == "__main__":
    main()
