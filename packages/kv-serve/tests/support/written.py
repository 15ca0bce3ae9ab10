"""Documents that transformers compresses into files, and what it answers behind them."""

from collections.abc import Sequence
from pathlib import Path

import torch

from asking import COUNT


def written(
    folder: str,
    policy: str,
    ids: Sequence[int],
    path: Path,
    page_tokens: int = 16,
    **how: object,
) -> object:
    """Write a document; return its model, and its cache, which may be continued."""
    from transformers import AutoModelForCausalLM

    from kv_transformers import CompressedCache, passing

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    cache, given = CompressedCache(model, policy, page_tokens=page_tokens), torch.tensor([[*ids]])
    with torch.no_grad():
        model(given, **passing(model, cache))
    cache.save(path, given, **how)
    return model, cache


def answer(model: object, cache: object, question: Sequence[int], count: int = COUNT) -> list[int]:
    """Generate greedily behind a document."""
    from kv_transformers import passing

    fresh, found = torch.tensor([list(question)]), []
    for _ in range(count):
        with torch.no_grad():
            logits = model(fresh, **passing(model, cache)).logits
        found.append(int(logits[0, -1].argmax()))
        fresh = torch.tensor([found[-1:]])
    return found
