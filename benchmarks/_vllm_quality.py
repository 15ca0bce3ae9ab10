"""The samples of an evaluation, asked of an engine of vLLM, and what their scores are sure of."""

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev

from _vllm_engine import Ask, Counts, Room, started
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.v1.engine.llm_engine import LLMEngine

from kv_serve.tasks import Sample, found_share

Z: float = 1.959964  # of a normal distribution's middle 95 %


def scores(way: str, room: Room, tasks: Mapping[str, Sequence[Sample]]) -> dict[str, list[float]]:
    """Score every sample, one at a time: 1 or 0 for an answer, nats per token for a text."""
    with started(way, room) as (engine, _):
        tokenizer = AutoTokenizer.from_pretrained(room.arguments(way)["model"])

        def score(sample: Sample, name: str) -> float:
            output = _asked(engine, name, sample)
            if sample.target_ids:
                return _nats(output, sample)
            text = str(tokenizer.decode(list(output.outputs[0].token_ids)))
            return found_share(text, sample.answers)

        return {
            task: [score(sample, f"{task}.{i}") for i, sample in enumerate(samples)]
            for task, samples in tasks.items()
        }


def answered_among(
    way: str, room: Room, tasks: Mapping[str, Sequence[Sample]], beside: Sequence[Ask]
) -> dict[str, object]:
    """Ask all samples and all others at once; give each sample's score, and what was preempted.

    Others come before the samples and between them, evenly.
    """
    samples = {f"{task}.{i}": s for task, each in tasks.items() for i, s in enumerate(each)}
    others = {f"beside.{i}": ask for i, ask in enumerate(beside)}
    turns = {name: i / len(others) for i, name in enumerate(others)}
    turns |= {name: (i + 1) / len(samples) for i, name in enumerate(samples)}
    found: dict[str, float] = {}
    with started(way, room) as (engine, counting):
        tokenizer = AutoTokenizer.from_pretrained(room.arguments(way)["model"])
        counting.counts = Counts()
        for name in sorted(turns, key=turns.__getitem__):
            if name in others:
                ask, settings = others[name], _exactly(others[name].answer)
                engine.add_request(name, {"prompt_token_ids": list(ask.prompt)}, settings)
            else:
                _ask(engine, name, samples[name])
        while engine.has_unfinished_requests():
            for output in engine.step():
                name = output.request_id.partition("-")[0]
                if output.finished and name in samples:
                    text = str(tokenizer.decode(list(output.outputs[0].token_ids)))
                    found[name] = found_share(text, samples[name].answers)
        counts = counting.counts
    each = {task: [found[f"{task}.{i}"] for i in range(len(s))] for task, s in tasks.items()}
    more = {"preemptions": counts.preemptions, "peak_running": counts.peak_running}
    return {**each, **more, "peak_usage": counts.peak_usage}


def _asked(engine: LLMEngine, name: str, sample: Sample) -> RequestOutput:
    """Run one request to its end."""
    _ask(engine, name, sample)
    while True:
        for output in engine.step():
            if output.finished:
                return output


def _ask(engine: LLMEngine, name: str, sample: Sample) -> None:
    """Hand a sample to an engine."""
    settings = SamplingParams(
        temperature=0,
        max_tokens=max(sample.new_tokens, 1),
        ignore_eos=not sample.stop,
        prompt_logprobs=0 if sample.target_ids else None,
    )
    prompt = [*sample.prompt_ids, *sample.question_ids, *sample.target_ids]
    engine.add_request(name, {"prompt_token_ids": prompt}, settings)


def _exactly(tokens: int) -> SamplingParams:
    """For an answer of so many tokens, whatever they are."""
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def _nats(output: RequestOutput, sample: Sample) -> float:
    """Nats per token of the target, whose tokens end the prompt."""
    count = len(sample.target_ids)
    logprobs = output.prompt_logprobs
    assert logprobs is not None
    pairs = zip(logprobs[-count:], sample.target_ids, strict=True)
    return -mean(each[token].logprob for each, token in pairs)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval of 95 % for a mean, by its standard error."""
    half = Z * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return mean(values) - half, mean(values) + half
