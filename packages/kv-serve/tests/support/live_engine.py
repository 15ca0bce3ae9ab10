"""A small vLLM engine in the test process, with its scheduler and worker state."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm import LLM

    from kv_serve.vllm.scheduler_state import SchedulerState
    from kv_serve.vllm.worker import Worker

Greedy = Callable[["LLM", Sequence[Sequence[int]], int], list[list[int]]]
OPTIONS = {
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "skip_tokenizer_init": True,
    "load_format": "dummy",
    "poison": True,
}


def ends(engine: "LLM") -> tuple["SchedulerState", "Worker"]:
    """Return the scheduler's and the worker's state, which share this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    return scheduler.connector.scheduler_state, get_kv_transfer_group().worker


def is_empty(engine: "LLM", greedy: Greedy) -> bool:
    """Return whether all pages are free after a step that reports ended requests to the worker."""
    state, worker = ends(engine)
    greedy(engine, [[5]], 1)
    pool = state.manager.block_pool
    held = {*worker.requests.prefills, *worker.requests.names} - state.known.keys()
    return pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 and not held
