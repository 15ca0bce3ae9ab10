"""Requests to an engine in the test process, and the prefixes that it stores."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from live_engine import ends

if TYPE_CHECKING:
    from vllm import LLM

LARGE = {  # options of an engine whose prompts are read in one step
    "kv_cache_memory_bytes": 1 << 20,
    "max_model_len": 256,
    "max_num_batched_tokens": 512,
    "dtype": "float32",
    "skip_tokenizer_init": True,
}
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


def pages(engine: "LLM") -> tuple[int, int]:
    """Return the pages of prefixes, and of the last request, as none has ended later."""
    _, worker = ends(engine)
    held = worker.requests.held(kept=False).values()
    return sum(worker.prefix_pages.values()), sum(each.pages for each in held)


def reset(engine: "LLM") -> None:
    """Drop all prefixes."""
    assert engine.llm_engine.reset_prefix_cache(reset_connector=True)
