"""How many bytes of keys and values vLLM says are held, after each of its steps."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.v1.metrics.loggers import StatLoggerBase

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats


class Usage(StatLoggerBase):
    """Keeps the share of blocks in use of the last step; vLLM makes one through `Usage.into`."""

    def __init__(self, vllm_config: "VllmConfig", engine_index: int = 0) -> None:
        """Start at nothing."""
        self.share = 0.0

    @classmethod
    def into(cls, made: "list[Usage]") -> "Callable[[VllmConfig, int], Usage]":
        """Give what vLLM calls to make one, which puts it into the list."""

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
        """Take in one step; the arguments are vLLM's."""
        if scheduler_stats is not None:
            self.share = scheduler_stats.kv_cache_usage

    def log_engine_initialized(self) -> None:
        """Say nothing."""


def pool_bytes(engine: "LLMEngine") -> int:
    """Give the bytes of all blocks that requests can have, of an engine in this process.

    vLLM keeps one block to itself.
    """
    config = engine.engine_core.engine_core.scheduler.kv_cache_config
    allocated = sum(int(tensor.size) for tensor in config.kv_cache_tensors)
    return allocated - allocated // int(config.num_blocks)
