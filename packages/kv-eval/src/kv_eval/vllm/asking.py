"""Running samples of an evaluation in a vLLM engine in a separate process."""

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

# The engine runs in the calling process, without a server.
ALONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}


@dataclass(frozen=True, slots=True)
class Engine:
    """Settings of an engine.

    Attributes:
        model: a name or folder that vLLM can serve.
        dtype: vLLM's name of the dtype.
        policy: text of the policy; None for vLLM's own cache.
        kv_bytes: memory for keys and values.
        longest: tokens of the longest request with its answer.
    """

    model: str
    dtype: str
    policy: str | None
    kv_bytes: int
    longest: int

    def arguments(self) -> dict[str, Any]:
        """Return arguments for vLLM: prefill in one step, no prefix caching."""
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
    """The reply to a sample.

    Attributes:
        tokens: generated tokens, without the end token.
        nats: per token of the sample's targets; None without targets.
        kv_bytes: of the blocks allocated after the prompt was read and compressed, and one or two
            more tokens, as vLLM counts blocks.
        seconds: from the request to its end.
    """

    tokens: tuple[int, ...]
    nats: float | None
    kv_bytes: int
    seconds: float


def replies(engine: Engine, samples: Sequence[Sample]) -> Iterator[Reply]:
    """Start an engine, and yield the replies to the samples in order.

    The process ends with the iteration, even if that is abandoned.

    Raises:
        ValueError: vLLM or the policy refuses the model or the settings.
        RuntimeError: the process exited before all samples were answered.
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
                    f"vLLM exited with status {process.exitcode} under "
                    f"{engine.policy or 'its own cache'}; see its output above"
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
    with suppress(BrokenPipeError, KeyboardInterrupt):  # the reader has stopped
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
        raise RuntimeError("vLLM did not generate the forced tokens")
    if answer.logprobs is None:
        raise RuntimeError("vLLM returned no log-probabilities")
    pairs = zip(answer.logprobs, sample.target_ids, strict=True)
    nats = -mean(each[token].logprob for each, token in pairs)
    return Reply((), nats, kv_bytes, seconds)
