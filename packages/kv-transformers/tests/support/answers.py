"""Answers of tiny models to two prompts, and their comparison."""

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kv_transformers.cache_argument import passing


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids and the mask of two prompts, the second with padding on its left."""
    generator = torch.Generator().manual_seed(5)
    ids, mask = torch.randint(3, 101, (2, 21), generator=generator), torch.ones(2, 21).long()
    mask[1, :4] = ids[1, :4] = 0
    return ids, mask


def answered(model: PreTrainedModel, cache: Any, new: int = 12, **options: Any) -> Any:
    """Continue the prompts greedily with a cache."""
    ids, mask = prompts()
    options = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new} | options
    given = {"input_ids": ids, "attention_mask": mask} | passing(model, cache) | options
    return model.generate(**given, return_dict_in_generate=True, output_logits=True, pad_token_id=0)


def own(model: PreTrainedModel) -> DynamicCache:
    """Return the cache that transformers would use."""
    return DynamicCache(config=model.config)


def expect_same(got: Any, want: Any, near: float = 2e-5) -> None:
    """Raise if tokens differ, or logits by more than `near` of their deviation."""
    assert torch.equal(got.sequences, want.sequences)
    expect_near(torch.stack(got.logits), torch.stack(want.logits), near)


def expect_near(got: torch.Tensor, want: torch.Tensor, near: float = 2e-5) -> None:
    """Raise if logits differ by more than `near` of their deviation."""
    torch.testing.assert_close(got, want, rtol=0, atol=near * float(want.std()))
