"""A trace of a real service, scaled to a small model, and an engine served as the trace says."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final
from uuid import uuid4

from _vllm_engine import Ask, Room
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

STUCK: Final = 900.0  # seconds in which no request gets a token


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    at: float  # seconds from the first one
    prompt: int  # tokens
    answer: int


@dataclass(frozen=True, slots=True)
class Scale:
    """How a trace of a large model's service is made to fit a small one's."""

    prompt: float = 1 / 8
    answer: float = 1 / 2
    longest: int = 4096  # tokens; longer requests are left out, and counted
    requests: int = 48  # the first of what is left


def read_trace(path: Path, scale: Scale) -> tuple[list[Arrival], int]:
    """Read the JSON lines of a Mooncake trace; give arrivals, and how many were left out between.

    A line has `timestamp` (milliseconds), `input_length` and `output_length` (tokens).

    Raises:
        ValueError: a line is not one of such a trace, or there are too few that fit.
    """
    found: list[Arrival] = []
    left_out = 0
    with path.open() as file:
        for number, line in enumerate(file, 1):
            try:
                entry = json.loads(line)
                at = entry["timestamp"] / 1000
                lengths = entry["input_length"], entry["output_length"]
            except (KeyError, TypeError, json.JSONDecodeError) as error:
                raise ValueError(
                    f"{path}:{number} is not a line of a Mooncake trace, which names timestamp, "
                    f"input_length and output_length: {error!r}"
                ) from error
            prompt = max(1, round(lengths[0] * scale.prompt))
            answer = max(1, round(lengths[1] * scale.answer))
            if prompt + answer > scale.longest:
                left_out += 1
                continue
            found.append(Arrival(at, prompt, answer))
            if len(found) == scale.requests:
                return [replace(each, at=each.at - found[0].at) for each in found], left_out
    raise ValueError(
        f"{path} has {len(found)} requests that fit {scale.longest} tokens; {scale.requests} were "
        "asked for"
    )


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """Stretch the times, so that this many requests a second come on average.

    Raises:
        ValueError: all come at the same time; a trace whose clock is coarse begins like that.
    """
    if not arrivals[-1].at:
        raise ValueError(f"the first {len(arrivals)} requests come at one time; take more of them")
    stretch = (len(arrivals) - 1) / rate / arrivals[-1].at
    return [replace(each, at=each.at * stretch) for each in arrivals]


def asks_of(arrivals: Sequence[Arrival], ids: Sequence[int]) -> list[Ask]:
    """Windows of a text as long as the requests; a text may be repeated for the longest."""
    longest = max(each.prompt for each in arrivals)
    text = list(ids) * (1 + longest // len(ids))
    begins = (617 * i % (len(text) - each.prompt + 1) for i, each in enumerate(arrivals))
    return [
        Ask(tuple(text[begin : begin + each.prompt]), each.answer)
        for begin, each in zip(begins, arrivals, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Answered:
    """When the tokens of one request came, in seconds from its arrival."""

    tokens: tuple[float, ...]

    @property
    def ttft(self) -> float:
        """To the first token."""
        return self.tokens[0]

    @property
    def between(self) -> list[float]:
        """From each token to the next."""
        return [after - before for before, after in pairwise(self.tokens)]

    @property
    def mean_between(self) -> float:
        """Of those; 0 for an answer of one token."""
        return (self.tokens[-1] - self.tokens[0]) / max(len(self.tokens) - 1, 1)


def replayed(
    way: str, room: Room, arrivals: Sequence[Arrival], asks: Sequence[Ask]
) -> tuple[float, list[Answered]]:
    """Start vLLM's server engine, ask when the trace says, and give the seconds till the last end.

    Raises:
        TimeoutError: no token came for too long.
        RuntimeError: an answer is not as long as asked.
    """
    return asyncio.run(_replay(way, room, arrivals, asks))


async def _replay(
    way: str, room: Room, arrivals: Sequence[Arrival], asks: Sequence[Ask]
) -> tuple[float, list[Answered]]:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**room.arguments(way)))
    try:
        for ask in asks[:2]:
            await _answer(engine, Ask(ask.prompt[:64], 4), 0.0, time.perf_counter())
        start = time.perf_counter()
        each = (_answer(engine, ask, a.at, start) for a, ask in zip(arrivals, asks, strict=True))
        answers = await asyncio.gather(*each)
        return time.perf_counter() - start, answers
    finally:
        engine.shutdown()


async def _answer(engine: AsyncLLM, ask: Ask, at: float, start: float) -> Answered:
    """Ask at a time; a late start of the event loop counts as waiting."""
    await asyncio.sleep(start + at - time.perf_counter())
    settings = SamplingParams(
        temperature=0,
        max_tokens=ask.answer,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
    prompt = {"prompt_token_ids": list(ask.prompt)}
    came: list[float] = []
    stream = engine.generate(prompt, settings, uuid4().hex)
    while True:
        try:
            output = await asyncio.wait_for(anext(stream), STUCK)
        except StopAsyncIteration:
            break
        now = time.perf_counter() - start - at
        came += [now] * len(output.outputs[0].token_ids)
    if len(came) != ask.answer:
        raise RuntimeError(f"an answer has {len(came)} tokens of {ask.answer}")
    return Answered(tuple(came))
