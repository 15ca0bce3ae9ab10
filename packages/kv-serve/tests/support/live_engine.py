"""A small engine of vLLM in the process of the tests, and what its two sides know."""

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
    """What the scheduler and the worker know, which are in one process here."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    return scheduler.connector.scheduler_state, get_kv_transfer_group().worker


def is_empty(engine: "LLM", greedy: Greedy) -> bool:
    """Whether nothing is held once a step has told the worker who is gone."""
    state, worker = ends(engine)
    greedy(engine, [[5]], 1)
    pool = state.manager.block_pool
    held = {*worker.requests.prefills, *worker.requests.names} - state.known.keys()
    return pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 and not held
