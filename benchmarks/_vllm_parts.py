"""Where the time of a run goes: the parts of an engine in this process, timed while it runs."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any
from unittest.mock import patch

from _vllm_engine import Ask, Room, serve, started
from vllm.v1.engine.llm_engine import LLMEngine

from kv_runtime import PolicyCache, SlotLayer


@dataclass
class Clock:
    """Seconds by part; a part inside another one counts for both."""

    seconds: Counter[str] = field(default_factory=Counter)
    reads_prompt: bool = False  # whether a request of this step has more than one new token

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Do the same, and add what it takes."""

        def doing(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return work(*arguments, **named)
            finally:
                part = name.format(kind="prompt" if self.reads_prompt else "decode")
                self.seconds[part] += time.perf_counter() - began

        return doing

    def scheduled(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        """Note what kind of step comes."""

        def scheduling(*arguments: Any, **named: Any) -> Any:
            found = schedule(*arguments, **named)
            self.reads_prompt = max(found.num_scheduled_tokens.values(), default=0) > 1
            return found

        return scheduling


@contextmanager
def watched(engine: LLMEngine) -> Iterator[Clock]:
    """Time the engine's attention, its storing, its model and its steps, stock or ours."""
    clock = Clock()
    scheduler = engine.engine_core.engine_core.scheduler
    runner = engine.model_executor.driver_worker.worker.model_runner
    layers = engine.vllm_config.compilation_config.static_forward_context.values()
    with ExitStack() as stack:

        def put(owner: object, name: str, part: str) -> None:
            work = clock.timed(part, getattr(owner, name))
            stack.enter_context(patch.object(owner, name, work))

        for layer in layers:
            put(layer.impl, "forward", "attention, {kind}")
            if not layer.attn_backend.forward_includes_kv_cache_update:
                put(layer.impl, "do_kv_cache_update", "storing apart, {kind}")
        # Ours stores inside its attention, in objects that come and go: the classes are patched.
        for owner, name in ((SlotLayer, "_store"), (PolicyCache, "keep")):
            inside = clock.timed("storing inside, {kind}", getattr(owner, name))
            stack.enter_context(patch.object(owner, name, partialmethod(inside)))
        put(runner, "_model_forward", "model, {kind}")
        put(engine, "step", "step, {kind}")
        schedule = clock.scheduled(scheduler.schedule)
        stack.enter_context(patch.object(scheduler, "schedule", schedule))
        yield clock


def shares(seconds: Counter[str]) -> dict[str, float]:
    """Shares of all steps, which add up to 1: no part holds another."""
    total = sum(seconds[f"step, {kind}"] for kind in ("prompt", "decode"))
    found = {}
    for kind in ("prompt", "decode"):
        inside, apart = (seconds[f"storing {where}, {kind}"] for where in ("inside", "apart"))
        attention = seconds[f"attention, {kind}"] - inside
        found[f"attention_{kind}"] = attention / total
        found[f"storing_{kind}"] = (inside + apart) / total
        rest = seconds[f"model, {kind}"] - attention - inside - apart
        found[f"model_{kind}"] = rest / total
        outside = seconds[f"step, {kind}"] - seconds[f"model, {kind}"]
        found[f"engine_{kind}"] = outside / total
    return found


def parts(way: str, room: Room, asks: Sequence[Ask]) -> dict[str, object]:
    """Start an engine and say where the time of these requests goes, in shares of the run.

    Steps that read prompts, of which most decode other requests as well, and steps that only decode
    are told apart. `model` is what the model does but for attention and storing, `engine` what is
    outside of the model: scheduling, preparing, sampling.
    """
    with started(way, room) as (engine, counting):
        serve(engine, counting, [Ask(ask.prompt[:64], 4) for ask in asks[:2]])
        with watched(engine) as clock:
            found = serve(engine, counting, asks)
    return {"seconds": found.seconds, "threads": found.threads, **shares(clock.seconds)}
