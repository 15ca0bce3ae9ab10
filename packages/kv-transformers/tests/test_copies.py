"""Copies of a cache: several answers to one prompt match those of separate caches."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from alone import POLICIES, Reader, left, sharp_model
from kv_paging import PoolExhausted
from kv_transformers import CompressedCache
from kv_transformers.cache_argument import passing

MASK = left(11, 1, 6)
IDS = torch.randint(3, 101, MASK.shape, generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return sharp_model()


def started(reader: Reader) -> CompressedCache:
    cache = reader.cache()
    reader.read(cache, IDS, MASK, 0, MASK.shape[1])
    return cache


def answer(reader: Reader, cache: CompressedCache, first: int, count: int = 3) -> Tensor:
    """Return the logits of a few more tokens per row, which depend on `first`."""
    rows = len(MASK)
    ids = torch.cat((IDS, first + torch.arange(rows * count).view(rows, count)), 1)
    mask = torch.cat((MASK, torch.ones(rows, count, dtype=torch.bool)), 1)
    at = range(MASK.shape[1], MASK.shape[1] + count)
    return torch.cat([reader.read(cache, ids, mask, i, i + 1) for i in at], 1)


@pytest.mark.parametrize("policy", POLICIES)
@torch.no_grad()
def test_a_copy_and_what_it_is_a_copy_of_answer_as_fresh_caches(model, policy) -> None:
    reader = Reader(model, policy)
    cache = started(reader)
    with torch.inference_mode():
        second = copy.deepcopy(cache)
    found = [answer(reader, cache, 5), answer(reader, second, 40)]
    wanted = [answer(reader, started(reader), first) for first in (5, 40)]
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    for each in (cache, second):
        each.runtime.batch.pool.check(each.runtime.batch.pages())


@pytest.mark.parametrize("policy", POLICIES[1::4])
@torch.no_grad()
def test_a_copy_in_mid_chat_is_repeated_and_reset_on_its_own(model, policy) -> None:
    reader = Reader(model, policy)
    cache = started(reader)
    answer(reader, cache, 5)
    before = cache.memory().tokens
    second = copy.deepcopy(cache)
    second.batch_repeat_interleave(2)
    place = torch.tensor([[14], [4], [9]]).repeat_interleave(2, 0)
    token = torch.tensor([[9], [8], [7]]).repeat_interleave(2, 0)
    mask = torch.nn.functional.pad(MASK, (0, 4), value=True).repeat_interleave(2, 0)
    both = {"attention_mask": mask, "position_ids": place}
    twice = model(token, **both, **passing(model, second)).logits
    assert torch.equal(cache.memory().tokens, before)
    each = {name: x[::2] for name, x in both.items()}
    once = model(token[::2], **each, **passing(model, cache)).logits
    torch.testing.assert_close(twice[::2], once, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(twice[1::2], once, rtol=1e-8, atol=1e-8)
    second.reset()
    reader.read(second, IDS, MASK, 0, MASK.shape[1])
    assert torch.equal(answer(reader, second, 40), answer(reader, started(reader), 40))


@pytest.mark.parametrize("policy", ["k8v4:window=3,keys=channel", "leankv:window=4", "raw"])
@torch.no_grad()
def test_what_is_let_go_gives_its_memory_back_at_once(model, policy) -> None:
    reader = Reader(model, policy)
    cache = started(reader)
    second = copy.deepcopy(cache)
    watched = [weakref.ref(each.runtime.batch.pool) for each in (cache, second)]
    gc.disable()
    try:
        del second
        assert watched[1]() is None
        assert watched[0]() is not None
        del cache
        assert watched[0]() is None
    finally:
        gc.enable()


@torch.no_grad()
def test_a_copy_of_a_fixed_pool_has_as_many_pages_of_its_own(model) -> None:
    cache = CompressedCache(model, "raw", pages=24, page_tokens=4)
    ids = torch.arange(3, 23)[None]
    model(ids, **passing(model, cache))
    second = copy.deepcopy(cache)
    model(ids[:, :4], **passing(model, second))
    assert (second.memory().pages_free, cache.memory().pages_free) == (0, 4)
    with pytest.raises(PoolExhausted, match="4"):
        model(ids[:, :4], **passing(model, second))
    model(ids[:, :4], **passing(model, cache))


@torch.no_grad()
def test_an_empty_cache_inside_other_things(model) -> None:
    cache = CompressedCache(model, "k8v4")
    second = copy.deepcopy({"cache": cache, "again": [cache]})
    assert second["cache"] is second["again"][0]
    assert second["cache"] is not cache
    assert second["cache"].policy is cache.policy
    got = model.generate(IDS[:1], max_new_tokens=3, **passing(model, second["cache"]))
    assert torch.equal(got, model.generate(IDS[:1], max_new_tokens=3, **passing(model, cache)))


@torch.no_grad()
def test_what_cannot_be_copied_or_saved_says_what_can(model) -> None:
    cache = CompressedCache(model, "raw")
    model(IDS, **passing(model, cache))
    with pytest.raises(TypeError, match=r"copy\.deepcopy\(cache\) creates one with its own pages"):
        copy.copy(cache)
    for save in (pickle.dumps, lambda x: torch.save(x, io.BytesIO())):
        with pytest.raises(TypeError, match=r"write it with cache\.save\(path\)"):
            save(cache)
    cache.runtime.begin(torch.ones(3, 1, dtype=torch.bool))
    with pytest.raises(RuntimeError, match=r"stopped at layer 0 of 2.*reset\(\)"):
        copy.deepcopy(cache)
    with pytest.raises(RuntimeError, match="stopped at layer 0 of 2"):
        cache.crop(-1)
