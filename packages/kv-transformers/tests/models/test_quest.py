"""Decode steps of the real model that read some pages."""

import pytest
import torch
from torch import Tensor

from kv_transformers import CompressedCache, passing
from kv_transformers.models import LoadedModel, load_model

PROMPT = 160
STEPS = 6


@torch.inference_mode()
def answered(loaded: LoadedModel, ids: Tensor, spec: str) -> tuple[Tensor, CompressedCache]:
    """Return the log-probabilities of the text's tokens after the prompt, one by one."""
    cache = CompressedCache(loaded.model, spec, page_tokens=8)
    parts = [ids[:, :PROMPT], *ids[:, PROMPT : PROMPT + STEPS].split(1, 1)]
    found = [
        loaded.model(input_ids=x, **passing(loaded.model, cache), use_cache=True).logits[:, -1]
        for x in parts
    ]
    return torch.stack(found, 1).float().log_softmax(-1), cache


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(device="cpu")


@pytest.fixture(scope="module")
def ids(loaded: LoadedModel) -> Tensor:
    facts = " ".join(f"The code of room {i} is {(i * 7919) % 9000 + 1000}." for i in range(24))
    found = loaded.tokenizer.encode(facts)
    assert len(found) >= PROMPT + STEPS
    return torch.tensor([found[: PROMPT + STEPS]])


def nats(found: Tensor, ids: Tensor) -> float:
    """Mean loss of the tokens after the prompt."""
    following = ids[:, PROMPT : PROMPT + STEPS, None]
    return -float(found[:, :STEPS].gather(-1, following).mean())


@pytest.mark.model
@pytest.mark.parametrize("storage", ["raw", "kv-compress:budget=160,floor=1"])
def test_all_pages_give_the_same_bits(loaded: LoadedModel, ids: Tensor, storage: str) -> None:
    full, _ = answered(loaded, ids, storage)
    found, _ = answered(loaded, ids, f"{storage}+quest:budget=100%,whole=0")
    assert torch.equal(found, full)


@pytest.mark.model
def test_a_quarter_of_the_pages_answers_nearly_as_all_do(loaded: LoadedModel, ids: Tensor) -> None:
    full, _ = answered(loaded, ids, "raw")
    quarter, cache = answered(loaded, ids, "quest:budget=25%")
    assert not torch.equal(quarter[:, 1:], full[:, 1:])
    assert torch.equal(quarter[:, 0], full[:, 0])  # the prompt reads everything
    assert nats(quarter, ids) < nats(full, ids) + 0.1
    coded, _ = answered(loaded, ids, "quest:budget=25%,by=codes")
    assert not torch.equal(coded, quarter)
    assert nats(coded, ids) < nats(full, ids) + 0.1
    few, _ = answered(loaded, ids, "quest:budget=16,whole=0,recent=1")
    assert nats(few, ids) > nats(quarter, ids)
    shape, pages = cache.runtime.shape, (PROMPT + STEPS - 1) // 8
    heads = shape.layers * shape.kv_heads
    assert cache.memory().bound_bytes >= heads * pages * 4 * shape.key_dim
