"""Engines of a stock vLLM inside this process, driven step by step and counted exactly."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import torch
from _vllm_ways import options
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.outputs import RequestOutput
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from kv_transformers.models import model_folder

STUCK: Final = 500  # steps without a token, more than the pieces of any prompt


@dataclass(frozen=True, slots=True)
class Room:
    """What an engine may use."""

    kv_bytes: int  # for keys and values
    longest: int = 8192  # tokens of a request, its answer included
    chunk: int = 2048  # tokens of one step
    together: int = 256  # requests that run at once
    compiled: bool = False  # as vLLM does it by itself; starting takes a minute longer
    model: str | None = None  # a folder; None: that of SmolLM2

    def arguments(self, way: str) -> dict[str, Any]:
        """Arguments of an engine; no prefix is shared, so that every request costs its own."""
        return {
            "model": self.model or str(model_folder()),
            "kv_cache_memory_bytes": self.kv_bytes,
            "max_model_len": self.longest,
            "max_num_batched_tokens": self.chunk,
            "max_num_seqs": self.together,
            "enable_prefix_caching": False,
            "enforce_eager": not self.compiled,
            **options(way),
        }


@dataclass(frozen=True, slots=True)
class Ask:
    """One request; its answer has exactly `answer` tokens."""

    prompt: tuple[int, ...] = field(repr=False)
    answer: int


@dataclass(slots=True)
class Counts:
    """What vLLM's own statistics say of a run."""

    steps: int = 0
    peak_running: int = 0
    peak_usage: float = 0.0  # of the blocks, as vLLM reports it
    preemptions: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    waiting: int = 0  # requests after the last step


class Counting(StatLoggerBase):
    """Adds up vLLM's statistics of each step; vLLM makes one through `Counting.into`."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        """Start at nothing."""
        self.counts = Counts()

    @classmethod
    def into(cls, made: "list[Counting]") -> Callable[[VllmConfig, int], "Counting"]:
        """Give what vLLM calls to make one, which puts it into the list."""

        def make(config: VllmConfig, index: int) -> Counting:
            made.append(cls(config, index))
            return made[-1]

        return make

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        """Take in one step; the arguments are vLLM's."""
        if scheduler_stats is not None:
            found = self.counts
            found.peak_running = max(found.peak_running, scheduler_stats.num_running_reqs)
            found.peak_usage = max(found.peak_usage, scheduler_stats.kv_cache_usage)
            found.waiting = scheduler_stats.num_waiting_reqs
        if iteration_stats is not None:
            self.counts.preemptions += iteration_stats.num_preempted_reqs
            self.counts.prompt_tokens += iteration_stats.num_prompt_tokens
            self.counts.output_tokens += iteration_stats.num_generation_tokens

    def log_engine_initialized(self) -> None:
        """Say nothing."""


@contextmanager
def started(way: str, room: Room, dtype: str = "auto") -> Iterator[tuple[LLMEngine, Counting]]:
    """Run an engine in this process; `dtype` is that of the model's weights."""
    made: list[Counting] = []
    engine = LLMEngine.from_engine_args(
        EngineArgs(**room.arguments(way), dtype=dtype), stat_loggers=[Counting.into(made)]
    )
    try:
        yield engine, made[0]
    finally:
        engine.engine_core.shutdown()


def pool_bytes(engine: LLMEngine) -> int:
    """Bytes of an engine's own tensors of keys and values."""
    runner = engine.model_executor.driver_worker.worker.model_runner
    pieces = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in runner.kv_caches
        if isinstance(t, torch.Tensor)
    }
    return sum(pieces.values())


def capacity(way: str, room: Room) -> dict[str, float]:
    """What vLLM says that it can hold."""
    with started(way, room) as (engine, _):
        cache = engine.vllm_config.cache_config
        return {
            "tokens": cache.kv_cache_size_tokens,
            "concurrency": cache.kv_cache_max_concurrency,
            "blocks": cache.num_gpu_blocks,
            "block_tokens": cache.block_size,
        }


@dataclass(frozen=True, slots=True)
class Ran:
    """A run of requests that all came at once."""

    seconds: float
    full_seconds: float  # until no request waited any more
    full_tokens: int  # generated until then
    threads: int
    counts: Counts

    def row(self) -> dict[str, object]:
        """Fields of a row; tokens a second while requests waited, and over all."""
        counts = asdict(self.counts)
        del counts["waiting"]
        ever = self.full_seconds > 0
        return {
            **counts,
            "threads": self.threads,
            "seconds": self.seconds,
            "full_seconds": self.full_seconds,
            "full_tokens_per_s": self.full_tokens / self.full_seconds if ever else None,
            "tokens_per_s": self.counts.output_tokens / self.seconds,
        }


def ask(engine: LLMEngine, name: str, what: Ask) -> None:
    """Hand a request to an engine."""
    settings = SamplingParams(temperature=0, max_tokens=what.answer, ignore_eos=True)
    engine.add_request(name, {"prompt_token_ids": list(what.prompt)}, settings)


def steps(engine: LLMEngine) -> Iterator[list[RequestOutput]]:
    """Step until all is answered; give the requests that each step finished.

    Raises:
        RuntimeError: nothing came for many steps.
    """
    silent = 0
    while engine.has_unfinished_requests():
        outputs = engine.step()
        silent = 0 if outputs else silent + 1
        if silent > STUCK:
            left = engine.get_num_unfinished_requests()
            raise RuntimeError(f"no token came in {STUCK} steps; {left} unanswered")
        yield [output for output in outputs if output.finished]


def serve(engine: LLMEngine, counting: Counting, asks: Sequence[Ask]) -> Ran:
    """Ask everything at once and step until all is answered.

    Raises:
        RuntimeError: nothing came for many steps, or an answer is not as long as asked.
    """
    for i, each in enumerate(asks):
        ask(engine, str(i), each)
    found = counting.counts = Counts()
    began, full = time.perf_counter(), (0.0, 0)
    for finished in steps(engine):
        found.steps += 1
        for output in finished:
            got, want = len(output.outputs[0].token_ids), asks[_number(output.request_id)].answer
            if got != want:
                raise RuntimeError(f"request {output.request_id} has {got} of {want} tokens")
        if found.waiting:
            full = time.perf_counter() - began, found.output_tokens
    seconds = time.perf_counter() - began
    return Ran(seconds, *full, torch.get_num_threads(), replace(found))


def ran(way: str, room: Room, asks: Sequence[Ask]) -> dict[str, object]:
    """Start an engine, let all parts of it run once, and measure."""
    with started(way, room) as (engine, counting):
        serve(engine, counting, [Ask(ask.prompt[:64], 4) for ask in asks[:2]])
        return serve(engine, counting, asks).row()


def _number(request_id: str) -> int:
    return int(request_id.partition("-")[0])
