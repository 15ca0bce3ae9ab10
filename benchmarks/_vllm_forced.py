"""Texts given to an engine of vLLM as if it had generated them: nats per token, token by token."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from _vllm_engine import Room
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.outputs import RequestOutput
from vllm.v1.engine.llm_engine import LLMEngine

from kv_eval.tasks import Sample
from kv_eval.vllm.forcing import Forced
from kv_serve.vllm.names import FORCED


def nats(way: str, room: Room, samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Nats per token of each sample's target after its prompt, all asked at once.

    Raises:
        RuntimeError: another token was generated than the target's.
    """
    engine = forcing(way, room)
    try:
        return {"nats": scored(engine, samples)}
    finally:
        engine.engine_core.shutdown()


def forcing(way: str, room: Room) -> LLMEngine:
    """Start an engine whose requests may be told what to generate."""
    given = EngineArgs(**room.arguments(way), logits_processors=[Forced])
    return LLMEngine.from_engine_args(given)


def scored(engine: LLMEngine, samples: Sequence[Sample]) -> list[float]:
    """Nats per token of each sample's target after its prompt, all asked of an engine at once.

    Raises:
        RuntimeError: another token was generated than the target's.
    """
    for i, sample in enumerate(samples):
        settings = SamplingParams(
            temperature=0,
            max_tokens=len(sample.target_ids),
            ignore_eos=True,
            logprobs=0,
            extra_args={FORCED: list(sample.target_ids)},
        )
        prompt = [*sample.prompt_ids, *sample.question_ids]
        engine.add_request(str(i), {"prompt_token_ids": prompt}, settings)
    found: dict[int, float] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                i = int(output.request_id.partition("-")[0])
                found[i] = _nats(output, samples[i])
    return [found[i] for i in range(len(samples))]


def _nats(output: RequestOutput, sample: Sample) -> float:
    answer = output.outputs[0]
    if list(answer.token_ids) != list(sample.target_ids):
        raise RuntimeError(f"request {output.request_id} did not generate what it was told to")
    assert answer.logprobs is not None
    pairs = zip(answer.logprobs, sample.target_ids, strict=True)
    return -mean(each[token].logprob for each, token in pairs)


def room_for(samples: Sequence[Sample], token_bytes: int) -> Room:
    """Memory in which all samples run at once, uncompressed."""
    longest = max(s.length + len(s.target_ids) for s in samples)
    held = (len(samples) + 1) * (longest + 64)
    return replace(Room(held * token_bytes, longest + 1), together=len(samples))
