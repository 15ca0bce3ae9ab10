"""Engines of vLLM in processes of their own, which take turns: prompts, decode steps, shares."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final
from unittest.mock import patch

import torch
from _vllm_engine import Ask, Room, ask, serve, started
from _vllm_process import STEPPED, asked
from vllm.v1.engine.llm_engine import LLMEngine

KERNELS: Final = ("decode_rows", "decode", "prompt")  # native attention
LONG: Final = 10_000  # tokens of an answer that no turn ends


@dataclass(slots=True)
class Worked:
    """Seconds in what a policy adds to an engine, and of these in native attention."""

    ours: float = 0.0
    kernels: float = 0.0
    inside: bool = field(default=False, repr=False)  # a part of ours does not count twice

    def part(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Do the same, and count it."""

        def doing(*given: Any, **named: Any) -> Any:
            if self.inside:
                return work(*given, **named)
            self.inside, began = True, time.perf_counter()
            try:
                return work(*given, **named)
            finally:
                self.ours += time.perf_counter() - began
                self.inside = False

        return doing

    def kernel(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Do the same, and count it as attention."""

        def doing(*given: Any) -> Any:
            began = time.perf_counter()
            try:
                return work(*given)
            finally:
                self.kernels += time.perf_counter() - began

        return doing


@contextmanager
def counted(engine: LLMEngine) -> Iterator[Worked]:
    """Count the layers' attention, the metadata of steps and the connector, stock or ours."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    found = Worked()
    runner = engine.model_executor.driver_worker.worker.model_runner
    layers = engine.vllm_config.compilation_config.static_forward_context.values()
    builders = {type(g.get_metadata_builder(0)) for each in runner.attn_groups for g in each}
    owners: list[tuple[object, str]] = [(layer.impl, "forward") for layer in layers]
    owners += [(builder, "build") for builder in builders]
    if has_kv_transfer_group():
        names = ("bind_connector_metadata", "wait_for_save", "build_connector_worker_meta")
        owners += [(get_kv_transfer_group(), name) for name in names]
    with ExitStack() as stack:
        for owner, name in owners:
            stack.enter_context(patch.object(owner, name, found.part(getattr(owner, name))))
        for name in KERNELS:
            work = getattr(torch.ops.kv_cpu, name, None)
            if work is not None:
                stack.enter_context(patch.object(torch.ops.kv_cpu, name, found.kernel(work)))
        yield found


def timed(engine: LLMEngine, count: int) -> list[float]:
    """Take steps; seconds of each."""
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    return seconds


def answer(way: str, room: Room, pipe: Connection) -> None:
    """Take a turn for each message, until there is none; see `Engine`."""
    with started(way, room) as (engine, counting):
        pipe.send(None)
        while message := pipe.recv():
            kind, given = message
            if kind == "prompt":
                began = time.perf_counter()
                serve(engine, counting, [Ask(given, 1)])
                pipe.send(time.perf_counter() - began)
            elif kind == "open":
                for i, prompt in enumerate(given):
                    ask(engine, str(i), Ask(prompt, room.longest - len(prompt)))
                    timed(engine, 1)
                pipe.send(len(timed(engine, 2)))
            elif kind == "steps":
                pipe.send(timed(engine, given))
            elif kind == "shares":
                timed(engine, 1)
                with counted(engine) as found:
                    total = sum(timed(engine, given))
                pipe.send((total, found.ours, found.kernels))
            else:
                engine.abort_request([str(i) for i in range(given)])
                pipe.send(len(timed(engine, 2)))


@dataclass(frozen=True)
class Engine:
    """An engine in a process of its own, which works when asked."""

    pipe: Connection

    @classmethod
    def start(cls, way: str, room: Room, threads: int, held: ExitStack) -> "Engine":
        """Start it and wait until it can be asked; it ends with `held`."""
        bound = {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return cls(asked(answer, way, room, held=held, environment=STEPPED | bound))

    def prompt(self, prompt: Sequence[int]) -> float:
        """Seconds to the first token of a prompt that is alone."""
        return float(self._asked("prompt", tuple(prompt)))

    def open(self, prompts: Sequence[Sequence[int]]) -> None:
        """Read prompts that decode in the turns to come, until `close`."""
        self._asked("open", [tuple(prompt) for prompt in prompts])

    def steps(self, count: int) -> list[float]:
        """Take decode steps; seconds of each."""
        found: list[float] = self._asked("steps", count)
        return found

    def shares(self, count: int) -> tuple[float, float, float]:
        """Take decode steps; seconds of all, of what is ours in them, and of that in kernels."""
        found: tuple[float, float, float] = self._asked("shares", count)
        return found

    def close(self, count: int) -> None:
        """End the requests that decode."""
        self._asked("close", count)

    def _asked(self, kind: str, given: object) -> Any:
        self.pipe.send((kind, given))
        return self.pipe.recv()
