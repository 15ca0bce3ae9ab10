"""OpenVINO GenAI, which reads a GGUF file directly: its continuous batching, and paged attention.

A way is `WEIGHTS:KEYS/VALUES`, as `f16:u8/u8`, with `+evict=SHARE` behind it where its cache
eviction keeps a share of the prompt's tokens. A prompt is read in one step, as GenAI's own
`LLMPipeline` does, and no prefix is shared.
"""

import re
import sys
import time
from collections.abc import Sequence

import numpy as np
import openvino as ov
import openvino_genai as genai
from _gguf import weights
from _protocol import Opened, Room, answers, own_output, put, room_given, versions
from openvino_genai.py_openvino_genai import GenerationHandle

BLOCK = 32  # tokens
SETTLED = 3  # steps after which evicted tokens are freed
KEPT_ENDS = 64  # tokens at each end that are never evicted
PATTERN = re.compile(r"(?P<weights>\w+):(?P<keys>\w+)/(?P<values>\w+)(\+evict=(?P<share>[\d.]+))?")


class OpenVino:
    """Pipelines that are open, one for each way."""

    def __init__(self, model: str, room: Room) -> None:
        """Load nothing yet."""
        self._model, self._room = model, room
        self._made: dict[str, tuple[tuple[int, ...], genai.ContinuousBatchingPipeline]] = {}
        self._open: dict[str, list[GenerationHandle]] = {}

    def open(self, way: str, prompt: Sequence[int], batch: int, room: int) -> Opened:
        """Read a prompt for each sequence, in a pipeline with as much memory as they need.

        A pipeline stays until another size is asked, of any way.
        """
        size = len(prompt), batch, len(prompt) + room
        for other in [name for name, (made, _) in self._made.items() if made != size]:
            del self._made[other]  # frees its memory before there is another
        if way not in self._made:
            self._made[way] = size, self._pipeline(way, *size)
        _, pipeline = self._made[way]
        _read(pipeline, 0, prompt[:64], 2)  # all its parts have run once
        began, first, handles = time.perf_counter(), 0.0, []
        for i in range(batch):
            handle = _asked(pipeline, i + 1, prompt, room)
            while not handle.can_read():
                pipeline.step()
            first = first or time.perf_counter() - began
            handles.append(handle)
        for _ in range(SETTLED):
            pipeline.step()
        self._open[way] = handles
        return Opened(first, _held_bytes(pipeline, way))

    def steps(self, way: str, count: int) -> list[float]:
        """Take steps."""
        _, pipeline = self._made[way]
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            pipeline.step()
            seconds.append(time.perf_counter() - began)
        return seconds

    def close(self, way: str) -> None:
        """End the requests."""
        _, pipeline = self._made[way]
        for handle in self._open.pop(way):
            handle.cancel()
        while pipeline.has_non_finished_requests():
            pipeline.step()

    def nats(self, way: str, prompt: Sequence[int], target: Sequence[int]) -> float | None:
        """Let GenAI echo a prompt with its log-probabilities; the target is a step of its own.

        Attention reads keys and values of that step from the cache, too. Eviction comes after a
        prompt, so it cannot be seen this way.
        """
        if "+evict" in way:
            return None
        whole = [*prompt, *target]
        pipeline = self._pipeline(way, len(whole), 1, len(whole) + BLOCK, step=len(prompt))
        config = _config(1)
        config.echo, config.logprobs = True, 1
        handle = pipeline.add_request(0, ov.Tensor(np.array([whole], dtype=np.int64)), config)
        while pipeline.has_non_finished_requests():
            pipeline.step()
        ((_, found),) = handle.read().items()
        return -float(np.mean(found.generated_log_probs[len(prompt) : len(whole)]))

    def _pipeline(
        self, way: str, prompt: int, batch: int, longest: int, step: int | None = None
    ) -> genai.ContinuousBatchingPipeline:
        match = PATTERN.fullmatch(way)
        assert match is not None, way
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = (batch + 1) * (longest // BLOCK + 2)
        scheduler.max_num_seqs = batch
        scheduler.max_num_batched_tokens = step or longest
        scheduler.enable_prefix_caching = False
        if share := match["share"]:
            kept = int(float(share) * prompt) // BLOCK * BLOCK
            scheduler.use_cache_eviction = True
            scheduler.cache_eviction_config = genai.CacheEvictionConfig(
                KEPT_ENDS, KEPT_ENDS, kept, genai.AggregationMode.NORM_SUM
            )
        settings = {
            "INFERENCE_NUM_THREADS": self._room.threads,
            "KEY_CACHE_PRECISION": match["keys"],
            "VALUE_CACHE_PRECISION": match["values"],
        }
        path = weights(self._model, match["weights"])
        return genai.ContinuousBatchingPipeline(path, scheduler, "CPU", settings)


def _config(tokens: int) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos = tokens, True
    config.do_sample, config.apply_chat_template = False, False
    return config


def _asked(
    pipeline: genai.ContinuousBatchingPipeline, name: int, prompt: Sequence[int], tokens: int
) -> GenerationHandle:
    ids = ov.Tensor(np.array([prompt], dtype=np.int64))
    return pipeline.add_request(name, ids, _config(tokens))


def _read(
    pipeline: genai.ContinuousBatchingPipeline, name: int, prompt: Sequence[int], tokens: int
) -> None:
    handle = _asked(pipeline, name, prompt, tokens)
    while pipeline.has_non_finished_requests():
        pipeline.step()
    handle.read_all()


def _held_bytes(pipeline: genai.ContinuousBatchingPipeline, way: str) -> int:
    """The share of the blocks that is in use, of the pool's memory."""
    found = pipeline.get_metrics()
    # the elements of u4 tensors are counted as bytes, and two of them are one
    halved = 2 if ":u4/u4" in way else 1
    return int(found.kv_cache_size_in_bytes / halved * found.cache_usage / 100)


def main() -> None:
    """Answer what is asked."""
    out, (model, room) = own_output(), room_given()
    put(out, versions("openvino", "openvino-genai"))
    answers(OpenVino(model, room), sys.stdin, out)


if __name__ == "__main__":
    main()
