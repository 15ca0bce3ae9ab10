"""Many requests, some given up half-way, on an engine whose memory is too small for them.

Needs nothing of this folder, so that a test can call it with an engine of its own.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vllm import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

STUCK: Final = 500  # steps in which nothing was computed, freed or answered


class StuckError(RuntimeError):
    """An engine has requests and goes on with none of them."""


@dataclass(frozen=True, slots=True)
class Soak:
    """What is asked; lengths are drawn between two, both included."""

    requests: int = 2000
    together: int = 48  # unfinished requests that the engine has at a time
    prompt: tuple[int, int] = (16, 300)  # tokens
    answer: tuple[int, int] = (1, 64)
    aborted: float = 0.2  # share of the requests that are given up at a random step
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended; an engine without faults leaves nothing leaked and nothing unanswered."""

    requests: int
    answered: int  # with exactly as many tokens as asked
    aborted: int
    unanswered: int  # neither answered in full nor aborted
    leaked_blocks: int  # free before the first request and not after the last
    preemptions: int
    steps: int


class Soaking:
    """One soak over one engine in this process."""

    def __init__(self, engine: LLMEngine, soak: Soak, ids: Sequence[int]) -> None:
        """Take an engine without requests; prompts are windows of `ids`."""
        self.engine, self.soak, self.ids = engine, soak, ids
        self.random = random.Random(soak.seed)
        self.scheduler = engine.engine_core.engine_core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.wanted: dict[str, int] = {}  # tokens, by unfinished request
        self.doomed: dict[str, int] = {}  # the step at which a request is given up
        self.preempted: dict[str, int] = {}
        self.answered = self.aborted = self.preemptions = self.steps = self.asked = 0

    def run(self) -> Outcome:
        """Ask, step and give up until nothing is left.

        Raises:
            StuckError: nothing went on for `STUCK` steps.
        """
        free, silent = self.pool.get_num_free_blocks(), 0
        while self.asked < self.soak.requests or self.wanted:
            while self.asked < self.soak.requests and len(self.wanted) < self.soak.together:
                self._ask()
            before = self._progress()
            self._step()
            silent = 0 if self._progress() != before else silent + 1
            if silent > STUCK:
                running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
                raise StuckError(
                    f"nothing went on for {STUCK} steps; {running} requests run, {waiting} wait, "
                    f"{self.pool.get_num_free_blocks()} of {free} blocks are free"
                )
        leaked = free - self.pool.get_num_free_blocks()
        unanswered = self.asked - self.answered - self.aborted
        counts = self.asked, self.answered, self.aborted, unanswered, leaked
        return Outcome(*counts, self.preemptions, self.steps)

    def _ask(self) -> None:
        prompt, answer = (self.random.randint(*x) for x in (self.soak.prompt, self.soak.answer))
        begin = self.random.randrange(len(self.ids) - prompt)
        name = self.engine.add_request(
            str(self.asked),
            {"prompt_token_ids": list(self.ids[begin : begin + prompt])},
            SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True),
        )
        self.wanted[name] = answer
        if self.random.random() < self.soak.aborted:
            self.doomed[name] = self.steps + self.random.randrange(2 * answer)
        self.asked += 1

    def _step(self) -> None:
        for name in [name for name, step in self.doomed.items() if step <= self.steps]:
            self.engine.abort_request([name], internal=True)
            del self.doomed[name], self.wanted[name]
            self.aborted += 1
        names = {name.partition("-")[0]: name for name in self.wanted}
        for output in (x for x in self.engine.step() if x.finished):
            name = names[output.request_id.partition("-")[0]]
            self.doomed.pop(name, None)
            self.answered += len(output.outputs[0].token_ids) == self.wanted.pop(name)
        self.steps += 1
        for name, request in self.scheduler.requests.items():
            self.preemptions += request.num_preemptions - self.preempted.get(name, 0)
            self.preempted[name] = request.num_preemptions

    def _progress(self) -> tuple[object, ...]:
        computed = {name: r.num_computed_tokens for name, r in self.scheduler.requests.items()}
        return self.answered, self.aborted, computed
