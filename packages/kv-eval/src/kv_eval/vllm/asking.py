"""Samples of an evaluation, asked of an engine of vLLM in a process of its own."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import mean
from typing import TYPE_CHECKING, Any

from kv_eval.tasks import Sample
from kv_serve.vllm.names import KEY

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

    from kv_eval.vllm.usage import Usage

# The engine is in the process that asks, which is not to answer for a server.
ALONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}


@dataclass(frozen=True, slots=True)
class Engine:
    """What an engine is started with.

    Attributes:
        model: a name or folder that vLLM can serve.
        dtype: in which numbers it computes, as vLLM names them.
        policy: text of what compresses; None for vLLM's own cache.
        kv_bytes: what it may take for keys and values.
        longest: tokens of the longest request with its answer.
    """

    model: str
    dtype: str
    policy: str | None
    kv_bytes: int
    longest: int

    def arguments(self) -> dict[str, Any]:
        """Arguments for vLLM; a prompt is read in one step, and nothing is shared with another."""
        from kv_eval.vllm.forcing import Forced

        return {
            "model": self.model,
            "dtype": self.dtype,
            "kv_cache_memory_bytes": self.kv_bytes,
            "max_model_len": self.longest,
            "max_num_batched_tokens": self.longest,
            "max_num_seqs": 1,
            "enable_prefix_caching": False,
            "enforce_eager": True,
            "logits_processors": [Forced],
            "additional_config": {} if self.policy is None else {KEY: self.policy},
        }


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back for a sample.

    Attributes:
        tokens: what was generated, without what ended it.
        nats: per token of the sample's targets; None where it has none.
        kv_bytes: of the blocks held after the prompt was read and compressed, and a token or two
            more, as vLLM counts blocks.
        seconds: from asking to the end.
    """

    tokens: tuple[int, ...]
    nats: float | None
    kv_bytes: int
    seconds: float


def replies(engine: Engine, samples: Sequence[Sample]) -> Iterator[Reply]:
    """Start an engine, and give the reply to one sample after another as it comes.

    The process ends with the iteration, whoever ends it.

    Raises:
        ValueError: vLLM, or the policy, refuses the model or the settings.
        RuntimeError: the process ended before all were answered.
    """
    context = get_context("spawn")
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=_answer_all, args=(engine, samples, its), daemon=True)
    process.start()
    its.close()
    try:
        for _ in samples:
            try:
                reply = mine.recv()
            except EOFError:
                process.join()
                raise RuntimeError(
                    f"vLLM ended with status {process.exitcode} under "
                    f"{engine.policy or 'its own cache'}; what it said stands above"
                ) from None
            if isinstance(reply, str):
                raise ValueError(reply)
            yield reply
    finally:
        mine.close()
        process.terminate()
        process.join()


def _answer_all(engine: Engine, samples: Sequence[Sample], pipe: Connection) -> None:
    os.environ |= ALONE
    with suppress(BrokenPipeError, KeyboardInterrupt):  # nobody waits for more
        try:
            for reply in _answered(engine, samples):
                pipe.send(reply)
        except ValueError as error:
            pipe.send(str(error))


def _answered(engine: Engine, samples: Sequence[Sample]) -> Iterator[Reply]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from kv_eval.vllm.usage import Usage

    made: list[Usage] = []
    running = LLMEngine.from_engine_args(
        EngineArgs(**engine.arguments()), stat_loggers=[Usage.into(made)]
    )
    try:
        for i, sample in enumerate(samples):
            yield _asked(running, made[0], str(i), sample)
    finally:
        running.engine_core.shutdown()


def _asked(engine: "LLMEngine", usage: "Usage", name: str, sample: Sample) -> Reply:
    from vllm import SamplingParams

    from kv_eval.vllm.usage import pool_bytes
    from kv_serve.vllm.names import FORCED

    settings = SamplingParams(
        temperature=0,
        max_tokens=len(sample.target_ids) or max(sample.new_tokens, 1),
        ignore_eos=bool(sample.target_ids) or not sample.stop,
        logprobs=0 if sample.target_ids else None,
        extra_args={FORCED: list(sample.target_ids)} if sample.target_ids else None,
    )
    began, held = time.perf_counter(), 0.0
    prompt = [*sample.prompt_ids, *sample.question_ids]
    engine.add_request(name, {"prompt_token_ids": prompt}, settings)
    while True:
        for output in engine.step():
            if output.finished:
                seconds = time.perf_counter() - began
                return _reply(output, sample, round(held * pool_bytes(engine)), seconds)
            if len(output.outputs[0].token_ids) <= 2:  # the step after a prompt compresses it
                held = usage.share


def _reply(output: "RequestOutput", sample: Sample, kv_bytes: int, seconds: float) -> Reply:
    answer = output.outputs[0]
    tokens = tuple(answer.token_ids)
    if not sample.target_ids:
        ended = answer.finish_reason == "stop"
        return Reply(tokens[:-1] if ended else tokens, None, kv_bytes, seconds)
    if tokens != sample.target_ids:
        raise RuntimeError("vLLM did not generate what it was told to")
    if answer.logprobs is None:
        raise RuntimeError("vLLM gave no log-probabilities")
    pairs = zip(answer.logprobs, sample.target_ids, strict=True)
    nats = -mean(each[token].logprob for each, token in pairs)
    return Reply((), nats, kv_bytes, seconds)
