"""A policy that evicts nothing and stores exactly does not change the output."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import pytest
import torch
from msgspec import Meta
from transformers import DynamicCache

from kv_policy import CacheShape, Formats, Part, RawCodec, TokenFormat
from kv_transformers.cache_argument import passing


@dataclass(frozen=True)
class Windowed(Part):
    """Exact storage with a raw recent window, so that tokens pass through the ring buffer."""

    name: ClassVar[str] = "windowed"
    window: Annotated[int, Meta(ge=0)] = 5

    @property
    def formats(self) -> Formats:
        return self

    @property
    def tiers(self) -> int:
        return 1

    def bind(self, shape: CacheShape) -> tuple[TokenFormat, ...]:
        return (
            TokenFormat(
                RawCodec(shape.key_dim, shape.dtype), RawCodec(shape.value_dim, shape.dtype)
            ),
        )


POLICIES = ["raw", Windowed(5), Windowed(1), Windowed(64)]


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "phi3"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_greedy_tokens_of_a_ragged_batch(name, policy, make, batch, compressed) -> None:
    model, inputs = make(name), batch()
    options = {"max_new_tokens": 12, "do_sample": False}
    full = model.generate(**inputs, **options)
    ours = model.generate(**inputs, **options, **passing(model, compressed(model, policy)))
    assert torch.equal(ours, full)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("chunk", [1, 4, 50])
@torch.no_grad()
def test_logits_of_chunked_forwards_are_those_of_one(
    policy, chunk, make, batch, compressed
) -> None:
    model, inputs = make(), batch()
    whole = model(**inputs, **passing(model, DynamicCache())).logits
    cache, pieces, width = compressed(model, policy), [], inputs["input_ids"].shape[1]
    for start in range(0, width, chunk):
        end = min(start + chunk, width)
        mask = inputs["attention_mask"][:, :end]
        place = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:end]
        ids = inputs["input_ids"][:, start:end]
        pieces.append(
            model(ids, attention_mask=mask, position_ids=place, **passing(model, cache)).logits
        )
    got = torch.cat(pieces, 1)
    real = inputs["attention_mask"][:, : got.shape[1]].bool()
    place = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    whole = model(**inputs, position_ids=place, **passing(model, DynamicCache())).logits
    torch.testing.assert_close(got[real], whole[:, : got.shape[1]][real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_beams_go_on_from_the_beams_they_were_chosen_from(policy, make, batch, compressed) -> None:
    model, inputs = make(), batch((14, 8))
    options = {"max_new_tokens": 10, "num_beams": 3, "do_sample": False}
    full = model.generate(**inputs, **options)
    cache = compressed(model, policy)
    assert torch.equal(model.generate(**inputs, **options, **passing(model, cache)), full)
    assert cache.batch_size == 6


def test_sampling_draws_the_same_tokens(make, batch, compressed) -> None:
    model, inputs = make(), batch()
    options = {"max_new_tokens": 10, "do_sample": True, "temperature": 0.9}
    torch.manual_seed(11)
    full = model.generate(**inputs, **options)
    torch.manual_seed(11)
    ours = model.generate(**inputs, **options, **passing(model, compressed(model, "raw")))
    assert torch.equal(ours, full)


def test_generate_in_chunks_of_the_prompt(make, batch, compressed) -> None:
    model, inputs = make(), batch()
    options = {"max_new_tokens": 8, "do_sample": False}
    full = model.generate(**inputs, **options)
    ours = model.generate(
        **inputs, **options, prefill_chunk_size=7, **passing(model, compressed(model, "raw"))
    )
    assert torch.equal(ours, full)


def test_a_conversation_goes_on_in_the_same_cache(make, batch, compressed) -> None:
    model = make()
    torch.manual_seed(1)
    ids = torch.randint(3, 101, (1, 20))
    cache = compressed(model, "raw")
    first = model.generate(ids, max_new_tokens=6, do_sample=False, **passing(model, cache))
    more = torch.cat([first, torch.randint(3, 101, (1, 9))], 1)
    again = model.generate(more, max_new_tokens=6, do_sample=False, **passing(model, cache))
    assert torch.equal(again, model.generate(more, max_new_tokens=6, do_sample=False))
    assert cache.get_seq_length() == again.shape[1] - 1


@torch.no_grad()
def test_tokens_taken_back_leave_no_trace(make, batch, compressed) -> None:
    model = make()
    ids = torch.randint(3, 101, (2, 21))
    cache = compressed(model, "raw", page_tokens=4)
    model(ids, **passing(model, cache))
    used = cache.memory().pages_used
    assert cache.is_croppable
    model(torch.randint(3, 101, (2, 9)), **passing(model, cache))
    cache.crop(-9)
    assert cache.get_seq_length() == 21
    assert cache.memory().pages_used == used
    more = torch.randint(3, 101, (2, 3))
    got = model(more, **passing(model, cache)).logits
    whole = model(torch.cat([ids, more], 1)).logits[:, -3:]
    torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_other_caches_go_on_working_in_the_model(make, batch, compressed) -> None:
    model, inputs = make(), batch()
    before = model(**inputs, **passing(model, DynamicCache())).logits
    text = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    compressed(model, "raw")
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(**inputs, **passing(model, DynamicCache())).logits, before)
    assert torch.equal(model.generate(**inputs, max_new_tokens=6, do_sample=False), text)
    assert torch.equal(model(**inputs, use_cache=False).logits, before)


def test_a_cache_used_under_inference_mode_goes_on_outside(make, batch, compressed) -> None:
    model = make()
    ids = torch.randint(3, 101, (1, 12))
    cache = compressed(model, Windowed(4))
    with torch.inference_mode():
        model(ids, **passing(model, cache))
    with torch.no_grad():
        got = model(ids[:, :1], **passing(model, cache)).logits
        whole = model(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:]
    torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-5)


def test_sequences_repeated_under_inference_mode_go_on_outside(make, compressed) -> None:
    model = make()
    ids = torch.randint(3, 101, (1, 12))
    cache = compressed(model, Windowed(4))
    with torch.inference_mode():
        model(ids, **passing(model, cache))
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([1, 0]))
    with torch.no_grad():
        got = model(ids[:, :1].expand(2, -1), **passing(model, cache)).logits
        whole = model(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:]
    torch.testing.assert_close(got, whole.expand(2, -1, -1), rtol=1e-4, atol=1e-5)
