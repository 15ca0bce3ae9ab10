"""Bytes of keys and values in use, as vLLM reports them after each step."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.v1.metrics.loggers import StatLoggerBase

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats


class Usage(StatLoggerBase):
    """Records the share of blocks in use at the last step; vLLM creates it via `Usage.into`."""

    def __init__(self, vllm_config: "VllmConfig", engine_index: int = 0) -> None:
        """Start at 0."""
        self.share = 0.0

    @classmethod
    def into(cls, made: "list[Usage]") -> "Callable[[VllmConfig, int], Usage]":
        """Return a factory for vLLM that appends each instance to the list."""

        def make(config: "VllmConfig", index: int) -> Usage:
            made.append(cls(config, index))
            return made[-1]

        return make

    def record(
        self,
        scheduler_stats: "SchedulerStats | None",
        iteration_stats: "IterationStats | None",
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        """Record one step; the arguments are vLLM's."""
        if scheduler_stats is not None:
            self.share = scheduler_stats.kv_cache_usage

    def log_engine_initialized(self) -> None:
        """Log nothing."""


def pool_bytes(engine: "LLMEngine") -> int:
    """Return the bytes of all blocks available to requests, of an engine in this process.

    vLLM reserves one block.
    """
    config = engine.engine_core.engine_core.scheduler.kv_cache_config
    allocated = sum(int(tensor.size) for tensor in config.kv_cache_tensors)
    return allocated - allocated // int(config.num_blocks)
