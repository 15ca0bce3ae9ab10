"""The samples of an evaluation, asked of an engine of vLLM, and what their scores are sure of."""

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev

from _vllm_engine import Ask, Counts, Room, ask, started, steps
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.v1.engine.llm_engine import LLMEngine

from kv_eval.tasks import Sample, found_share

Z: float = 1.959964  # of a normal distribution's middle 95 %


def scores(way: str, room: Room, tasks: Mapping[str, Sequence[Sample]]) -> dict[str, list[float]]:
    """Score every sample, one at a time: 1 or 0 for an answer, nats per token for a text."""
    with started(way, room) as (engine, _):
        tokenizer = AutoTokenizer.from_pretrained(
            room.arguments(way)["model"], trust_remote_code=False
        )

        def score(sample: Sample, name: str) -> float:
            _ask(engine, name, sample)
            (output,) = (output for finished in steps(engine) for output in finished)
            if sample.target_ids:
                return _nats(output, sample)
            return _found(output, sample, tokenizer)

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
        tokenizer = AutoTokenizer.from_pretrained(
            room.arguments(way)["model"], trust_remote_code=False
        )
        counting.counts = Counts()
        for name in sorted(turns, key=turns.__getitem__):
            if name in others:
                ask(engine, name, others[name])
            else:
                _ask(engine, name, samples[name])
        for output in (output for finished in steps(engine) for output in finished):
            name = output.request_id.partition("-")[0]  # vLLM adds to it
            if name in samples:
                found[name] = _found(output, samples[name], tokenizer)
        counts = counting.counts
    each = {task: [found[f"{task}.{i}"] for i in range(len(s))] for task, s in tasks.items()}
    more = {"preemptions": counts.preemptions, "peak_running": counts.peak_running}
    return {**each, **more, "peak_usage": counts.peak_usage}


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


def _found(output: RequestOutput, sample: Sample, tokenizer: PreTrainedTokenizerBase) -> float:
    """The share of a sample's answers in what was generated."""
    return found_share(str(tokenizer.decode(list(output.outputs[0].token_ids))), sample.answers)


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
