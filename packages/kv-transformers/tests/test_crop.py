"""Removal of the newest columns, with any padding, and the errors if it is impossible."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kv_transformers.cache
from alone import Reader, left, right, sharp_model, steps
from kv_transformers import CompressedCache
from kv_transformers.cache_argument import passing


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return sharp_model()


FINISHED = torch.tensor([[True], [False], [True]])
BLOCKS = {
    "right": [left(7, 4, 1), right(5, 2, 1)],
    "left": [left(7, 4, 1), left(5, 2, 1)],
    "between": [left(6, 6, 3), torch.tensor([[1, 0, 1], [0, 0, 1], [0, 1, 0]]).bool()],
    "finished": [left(7, 4, 2), *steps(2, 3), FINISHED, FINISHED, FINISHED],
    "start": [left(7, 1, 2), *steps(1, 3)],
}


@pytest.mark.parametrize("policy", ["raw", "k8v4"])
@pytest.mark.parametrize("where", BLOCKS)
@torch.no_grad()
def test_what_is_cropped_leaves_no_trace(model, policy, where) -> None:
    reader, passes = Reader(model, policy), BLOCKS[where]
    mask = torch.cat(passes, 1)
    ids = torch.randint(3, 101, (3, mask.shape[1] + 3), generator=torch.Generator().manual_seed(2))
    ends = torch.tensor([p.shape[1] for p in passes]).cumsum(0).tolist()
    whole = read(reader, ids, mask, ends)
    for keep in (*range(mask.shape[1], 0, -3), 1, 0):
        cropped = copy.deepcopy(whole)
        cropped.crop(keep - mask.shape[1])
        assert cropped.get_seq_length() == keep
        assert cropped.runtime.batch.seen.tolist() == mask[:, :keep].sum(1).tolist()
        cropped.runtime.batch.pool.check(cropped.runtime.batch.pages())
        again = torch.cat((mask[:, :keep], torch.ones(3, 3, dtype=torch.bool)), 1)
        fresh = torch.cat((ids[:, :keep], ids[:, -3:]), 1)
        got = reader.read(cropped, fresh, again, keep, keep + 3)
        # The same passes up to there, as a pass attends to quantized tokens of earlier ones.
        other = read(reader, ids, mask, [*(end for end in ends if end < keep), keep])
        want = reader.read(other, fresh, again, keep, keep + 3)
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)


def read(reader: Reader, ids: Tensor, mask: Tensor, ends: list[int]) -> CompressedCache:
    """Return a cache filled by passes with these end columns."""
    cache, start = reader.cache(), 0
    for end in ends:
        if end > start:
            reader.read(cache, ids, mask, start, end)
        start = end
    return cache


@torch.no_grad()
def test_beams_are_cropped_by_their_own_padding(model) -> None:
    reader = Reader(model, "k8v4")
    cache, ids, mask = reader.cache(), torch.arange(3, 15).view(2, 6), right(6, 3)
    reader.read(cache, ids, mask, 0, 6)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 2, 1, 0]))
    cache.crop(-2)
    assert cache.runtime.batch.seen.tolist() == [3, 3, 4, 4]


def test_a_crop_under_inference_mode_goes_on_outside(model) -> None:
    reader, ids = Reader(model, "raw"), torch.arange(3, 11)[None]
    cache = reader.cache()
    with torch.inference_mode():
        model(ids, **passing(model, cache))
        cache.crop(-3)
    with torch.no_grad():
        got = model(ids[:, 5:], **passing(model, cache)).logits
        want = model(ids).logits[:, 5:]
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)


@torch.no_grad()
def test_a_positive_number_is_told_what_keeps_so_many_columns(model) -> None:
    cache = CompressedCache(model, "k8v4")
    model(torch.ones(1, 12, dtype=torch.long), **passing(model, cache))
    expected = r"crop\(-2\) keeps the first 10 of the 12 columns held, and crop\(-10\) removes the"
    with pytest.raises(ValueError, match=expected):
        cache.crop(10)
    with pytest.raises(ValueError, match="holds 12, so there is nothing to remove to keep 12"):
        cache.crop(12)
    with pytest.raises(ValueError, match="13 columns cannot be taken back: the cache holds 12"):
        cache.crop(-13)
    assert cache.get_seq_length() == 12
    cache.crop(-2)
    assert cache.get_seq_length() == 10
    with pytest.raises(ValueError, match="3 columns cannot be taken back: the cache holds none"):
        CompressedCache(model, "k8v4").crop(-3)


def test_drafts_of_another_model_are_taken_back(model) -> None:
    draft, ids = sharp_model(), torch.arange(3, 15)[None]
    with torch.no_grad():
        draft.lm_head.weight.add_(0.02 * torch.ones_like(draft.lm_head.weight).cumsum(0) / 101)
    options = {"max_new_tokens": 20, "do_sample": False}
    full = model.generate(ids, **options)
    cache = CompressedCache(model, "raw", backend="torch")
    found = model.generate(ids, **options, assistant_model=draft, **passing(model, cache))
    assert torch.equal(found, full)
    again = CompressedCache(model, "raw", backend="torch")
    lookup = model.generate(ids, **options, prompt_lookup_num_tokens=3, **passing(model, again))
    assert torch.equal(lookup, full)


def count_drafts(monkeypatch: pytest.MonkeyPatch) -> tuple[list[bool], list[int]]:
    """Return what will note drafts that are stored, and the arguments of crops."""
    confirmed: list[bool] = []
    cropped: list[int] = []
    store, crop = kv_transformers.cache.store_drafts, CompressedCache.crop

    def noting(cache, valid, tokens) -> None:
        confirmed.append(True)
        store(cache, valid, tokens)

    def cropping(self, columns) -> None:
        cropped.append(int(columns))
        crop(self, columns)

    monkeypatch.setattr(kv_transformers.cache, "store_drafts", noting)
    monkeypatch.setattr(CompressedCache, "crop", cropping)
    return confirmed, cropped


DRAFTED = ("k4v2", "k4v2:window=6", "snapkv:budget=12,window=4+k4v2:window=4", "hadamard+k4v2")


@pytest.mark.parametrize("policy", DRAFTED)
@pytest.mark.parametrize("method", ["assistant", "lookup"])
def test_assisted_answers_are_those_without_drafts(model, policy, method, monkeypatch) -> None:
    confirmed, cropped = count_drafts(monkeypatch)
    draft, ids = sharp_model(), torch.arange(3, 11).repeat(3)[None]
    with torch.no_grad():
        draft.lm_head.weight.add_(0.02 * torch.ones_like(draft.lm_head.weight).cumsum(0) / 101)
    options = {"max_new_tokens": 20, "do_sample": False}
    helped = {"assistant_model": draft} if method == "assistant" else {}
    helped |= {"prompt_lookup_num_tokens": 3} if method == "lookup" else {}

    def prefilled() -> CompressedCache:
        cache = CompressedCache(model, policy, backend="torch")
        with torch.no_grad():
            model(ids[:, :-1], **passing(model, cache))
        return cache

    plain, cache = prefilled(), prefilled()
    want = model.generate(ids, **options, **passing(model, plain))
    got = model.generate(ids, **options, **helped, **passing(model, cache))
    assert torch.equal(got, want)
    assert confirmed
    # A text that repeats may have no wrong ones, nor one that is stored almost as it is.
    assert min(cropped) < 0 or method == "lookup" or policy == DRAFTED[-1]
    assert cache.get_seq_length() == plain.get_seq_length()
    assert torch.equal(cache.memory().tokens, plain.memory().tokens)
    cache.runtime.batch.pool.check(cache.runtime.batch.pages())
    fresh = CompressedCache(model, policy, backend="torch")
    with pytest.raises(ValueError, match="read all of the prompt but its last token first"):
        model.generate(ids, **options, assistant_model=draft, **passing(model, fresh))


@pytest.mark.parametrize("policy", ["h2o:budget=12", "streaming:budget=12"])
def test_drafts_under_other_policies_are_refused_by_a_sentence(model, policy) -> None:
    ids = torch.arange(3, 11).repeat(3)[None]
    cache = CompressedCache(model, policy, backend="torch")
    with torch.no_grad():
        model(ids[:, :-1], **passing(model, cache))
    with pytest.raises(ValueError, match=r"cannot verify drafts, as .* generate without"):
        model.generate(ids, max_new_tokens=9, prompt_lookup_num_tokens=3, **passing(model, cache))
