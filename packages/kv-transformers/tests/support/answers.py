"""Answers of tiny models to two prompts, and their comparison."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kv_transformers import CompressedCache
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


def expect_follow_up(model: PreTrainedModel) -> None:
    """Raise unless a second turn is answered as with the model's own cache."""
    ids = prompts()[0][:1]
    more = torch.randint(3, 101, (1, 5), generator=torch.Generator().manual_seed(9))
    results = []
    for kept in (own(model), CompressedCache(model, "raw")):
        first = answered(model, kept, input_ids=ids, attention_mask=torch.ones_like(ids))
        whole = torch.cat((first.sequences, more), 1)
        turn = {"input_ids": whole, "attention_mask": torch.ones_like(whole)}
        results.append(answered(model, kept, **turn))
    expect_same(results[1], results[0])


def expect_beams(model: PreTrainedModel) -> None:
    """Raise unless beam search finds what it finds with the model's own cache."""
    want = answered(model, own(model), num_beams=3)
    got = answered(model, CompressedCache(model, "raw"), num_beams=3)
    assert torch.equal(got.sequences, want.sequences)


def expect_copies(model: PreTrainedModel) -> None:
    """Raise unless a copy answers as its original does, and a cleared cache as a new one."""
    cache = CompressedCache(model, "snapkv:budget=12,window=4+k8v4:window=3")
    first = answered(model, cache)
    copied = deepcopy(cache)
    more = torch.tensor([[7], [8]])
    mask = torch.ones(2, first.sequences.shape[1]).long()
    mask[1, :4] = 0
    given = {"input_ids": more, "attention_mask": mask}
    want = model(**given, **passing(model, cache)).logits
    torch.testing.assert_close(model(**given, **passing(model, copied)).logits, want)
    assert torch.equal(copied.memory().tokens, cache.memory().tokens)
    cache.reset()
    expect_same(answered(model, cache), first)


def expect_mass_of_eager(model: PreTrainedModel, patch: pytest.MonkeyPatch) -> None:
    """Raise unless the observed mass of a prompt is that of the model's own attention weights."""
    ids = prompts()[0][:1]
    cache, own_cache = CompressedCache(model, "h2o:budget=99"), own(model)
    seen: list[torch.Tensor] = []
    keep = cache.runtime.keep

    def record(
        layer: int, key: Any, value: Any, result: Any, queries: Any = None, unprojected: Any = None
    ) -> None:
        seen.append(result.mass[-1])
        keep(layer, key, value, result, queries, unprojected)

    patch.setattr(cache.runtime, "keep", record)
    model(ids, **passing(model, cache))
    assert cache.runtime.selector is not None
    what = cache.runtime.selector.observe
    model.set_attn_implementation("eager")
    try:
        weights = model(ids, output_attentions=True, **passing(model, own_cache)).attentions
    finally:
        model.set_attn_implementation("sdpa")
    for mass, each in zip(seen, weights, strict=True):
        total = each.sum(2)  # over queries, by head
        want = {"sum": total.sum(1), "mean": total.mean(1)}[what.group]
        torch.testing.assert_close(mass[:, 0], want, rtol=1e-4, atol=1e-5)
