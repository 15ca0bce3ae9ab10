"""Requests to an engine in the test process, and the prefixes that it stores."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from live_engine import ends

if TYPE_CHECKING:
    from vllm import LLM


def asked(
    engine: "LLM", prompts: Sequence[Sequence[int]], count: int, **extra: object
) -> list[tuple[list[int], int]]:
    """Generate greedily, and return ids and the tokens that were not read."""
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
