"""Requests to an engine in the test process, and the prefixes that it stores."""

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from live_engine import ends

if TYPE_CHECKING:
    from vllm import LLM

    from kv_serve.vllm.prefixes import Prefixes

LARGE = {  # options of an engine whose prompts are read in one step
    "kv_cache_memory_bytes": 1 << 20,
    "max_model_len": 256,
    "max_num_batched_tokens": 512,
    "dtype": "float32",
    "skip_tokenizer_init": True,
}
COUNT = 10  # new tokens of most answers
Answer = tuple[list[int], int]  # new tokens, and how many of the prompt's were not read


def asked(
    engine: "LLM", prompts: Sequence[Sequence[int]], count: int, **extra: object
) -> list[Answer]:
    """Generate greedily with these extra arguments."""
    from vllm import SamplingParams

    settings = SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, extra_args=extra or None
    )
    given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    answers = engine.generate(given, settings, use_tqdm=False)
    return [(list(each.outputs[0].token_ids), each.num_cached_tokens) for each in answers]


def arriving(
    engine: "LLM", requests: Mapping[str, tuple[Sequence[int], int, int]], draw: random.Random
) -> dict[str, list[int]]:
    """Let requests arrive at random steps, and abort some; return the answers of those that end.

    Args:
        engine: the engine.
        requests: prompt, boundary (`kv_prefix`) and tokens of the answer of each, by name.
        draw: the source of randomness.
    """
    from vllm import SamplingParams

    core, waiting, answers = engine.llm_engine, list(requests), {}
    while waiting or core.has_unfinished_requests():
        for name in [waiting.pop() for _ in range(min(len(waiting), draw.randint(0, 3)))]:
            prompt, mark, count = requests[name]
            settings = SamplingParams(
                temperature=0, max_tokens=count, ignore_eos=True, extra_args={"kv_prefix": mark}
            )
            core.add_request(name, {"prompt_token_ids": list(prompt)}, settings)
        for output in core.step():
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)
        if draw.random() < 0.05:
            core.abort_request([draw.choice(list(requests))])
    return answers


def in_parts(
    folder: str,
    policy: str,
    parts: Sequence[Sequence[int]],
    answer: int,
    page_tokens: int = 16,
) -> list[list[int]]:
    """Read the parts of a prompt one after another in transformers, each answered greedily.

    Args:
        folder: of the model.
        policy: its text.
        parts: the parts.
        answer: generated tokens after the last part, and after each before it that is a turn; 0:
            only the last is answered.
        page_tokens: tokens of a page.
    """
    from transformers import AutoModelForCausalLM

    from kv_transformers import CompressedCache, passing

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    cache, found, left = CompressedCache(model, policy, page_tokens=page_tokens), [], []
    for i, part in enumerate(parts):
        fresh, answers = torch.tensor([[*left, *part]]), []
        for _ in range(answer or (i + 1 == len(parts)) * COUNT or 1):
            with torch.no_grad():
                logits = model(fresh, **passing(model, cache)).logits
            answers.append(int(logits[0, -1].argmax()))
            fresh = torch.tensor([answers[-1:]])
        left = answers[-1:] if answer else []
        found.append(answers)
    return found


def pages(engine: "LLM") -> tuple[int, int]:
    """Return the pages of prefixes, and of the last request, as none has ended later."""
    _, worker = ends(engine)
    held = worker.requests.held(kept=False).values()
    return sum(worker.prefix_pages.values()), sum(each.pages for each in held)


def reset(engine: "LLM") -> None:
    """Drop all prefixes."""
    assert engine.llm_engine.reset_prefix_cache(reset_connector=True)


def stored(engine: "LLM") -> "Prefixes":
    """Return the prefixes that the scheduler knows."""
    prefixes = ends(engine)[0].manager.prefixes
    assert prefixes is not None
    return prefixes


def expect_consistent(engine: "LLM") -> None:
    """Assert that blocks are free but for those of prefixes, which workers know, too."""
    asked(engine, [[5]], 1)
    asked(engine, [[5]], 1)  # two steps later moved blocks are free
    prefixes, (state, worker) = stored(engine), ends(engine)
    told = {*prefixes.stored} - {*prefixes.kept.values()}  # the newest turn is not
    assert {*worker.requests.prefixes.caches} == told
    pool, source = state.manager.block_pool, state.manager.source
    every = prefixes.stored.values()
    pages = {block.block_id for each in every for block in each.blocks}
    others = {block.block_id for each in every for block in each.others}
    assert len(pages) == sum(len(each.blocks) for each in every)
    assert not pages & others
    idle = {block.block_id for block in source.idle}
    used = pool.num_gpu_blocks - pool.get_num_free_blocks()
    assert used == 2 + len(pages | others | idle)
    assert not any(each.users for each in every)
    reset(engine)
    asked(engine, [[5]], 1)
    asked(engine, [[5]], 1)
    if not prefixes.turns:
        assert not prefixes.stored
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 2
