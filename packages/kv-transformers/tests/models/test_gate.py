"""The gate for the real model keeps what a question after the text needs."""

import pytest
import torch

from kv_transformers import CompressedCache, passing
from kv_transformers.models import load_model

FILLER = (
    "The road follows the river for some miles and then turns towards the hills, where sheep "
    "graze between old walls. In summer the inn by the bridge serves tea in the garden until the "
    "evening. "
)


@pytest.mark.model
@torch.no_grad()
def test_a_number_is_found_in_an_eighth_of_a_text_by_a_later_question() -> None:
    loaded = load_model(device="cpu", dtype="float32")
    model, tokenizer = loaded.model, loaded.tokenizer
    text = FILLER * 6 + "The special number of the blue house is 48213. " + FILLER * 6
    asked = "\nQuestion: What is the special number of the blue house?\nAnswer: The number is"
    cache = CompressedCache(model, "gate:file=smollm2-135m,keep=12.5%")
    ids = tokenizer(text, return_tensors="pt").input_ids
    model(ids, **passing(model, cache))
    assert cache.memory().tokens.float().mean() <= ids.shape[1] / 8
    more = tokenizer(asked, return_tensors="pt", add_special_tokens=False).input_ids
    answer = []
    for _ in range(7):
        logits = model(more, **passing(model, cache)).logits
        more = logits[:, -1:].argmax(-1)
        answer.append(int(more))
    assert "48213" in tokenizer.decode(answer)
