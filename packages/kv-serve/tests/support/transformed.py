"""Reference generation by transformers under a policy, with the weights that vLLM uses."""

from collections.abc import Sequence

import torch

from kv_transformers import passing


def by_transformers(
    folder: str,
    policy: str | None,
    prompts: Sequence[Sequence[int]],
    count: int,
    dtype: torch.dtype = torch.float32,
    page_tokens: int = 16,
) -> list[list[int]]:
    """Generate greedily from each prompt separately; without a policy, in transformers' cache."""
    found = logits_by_transformers(folder, policy, prompts, count, dtype, page_tokens)
    return [logits.argmax(-1).tolist() for logits in found]


def logits_by_transformers(
    folder: str,
    policy: str | None,
    prompts: Sequence[Sequence[int]],
    count: int,
    dtype: torch.dtype = torch.float32,
    page_tokens: int = 16,
) -> list[torch.Tensor]:
    """Return the logits [count, vocabulary] of which each prompt's tokens are the largest."""
    from transformers import AutoModelForCausalLM

    from kv_transformers import CompressedCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        cache = None if policy is None else CompressedCache(model, policy, page_tokens=page_tokens)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **passing(model, cache),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        found.append(torch.cat(out.logits))
    return found
