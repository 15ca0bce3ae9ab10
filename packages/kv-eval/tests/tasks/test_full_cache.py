"""The real model's results with transformers' own cache."""

import pytest
import torch

from kv_eval.tasks import Sample, default_text, found, multikey, nats_per_token, needle, nll
from kv_transformers import passing


def answer(loaded, sample: Sample) -> str:
    """Prefill, question, greedy decoding: what an evaluator does, under the full cache."""
    from transformers import DynamicCache

    model = loaded.model
    cache = DynamicCache(config=model.config)
    said: list[int] = []
    with torch.inference_mode():
        model(torch.tensor([sample.prompt_ids]), **passing(model, cache), logits_to_keep=1)
        fed = torch.tensor([sample.question_ids])
        while len(said) < sample.new_tokens:
            token = int(
                model(fed, **passing(model, cache), logits_to_keep=1).logits[0, -1].argmax()
            )
            if sample.stop and token == model.generation_config.eos_token_id:
                break
            said.append(token)
            fed = torch.tensor([[token]])
    return loaded.tokenizer.decode(said)


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_finds_every_needle_at_2000_tokens() -> None:
    from kv_transformers.models import load_model

    loaded = load_model(dtype="bfloat16", device="cpu")
    samples = needle(loaded.tokenizer, default_text(), length=2000, samples=5, setting="agnostic")
    assert all(1990 < sample.length <= 2000 for sample in samples)
    answers = {sample.answers[0]: answer(loaded, sample) for sample in samples}
    assert {number: text for number, text in answers.items() if not found(text, number)} == {}


@pytest.mark.model
def test_smollm2_settings_feed_the_same_tokens() -> None:
    from kv_transformers.models import load_model

    tokenizer = load_model(device="cpu").tokenizer
    for task in (needle, multikey):
        aware, agnostic = (
            task(tokenizer, default_text(), length=1000, samples=4, setting=setting)
            for setting in ("aware", "agnostic")
        )
        for one, other in zip(aware, agnostic, strict=True):
            assert one.prompt_ids + one.question_ids == other.prompt_ids + other.question_ids


@pytest.mark.model
def test_smollm2_expects_prose() -> None:
    """A broken conversion or a shift of one token would cost several nats."""
    from kv_transformers.models import load_model

    loaded = load_model(dtype="float32", device="cpu")
    (sample,) = nll(loaded.tokenizer, default_text(), length=512, samples=1, continuation=64)
    ids = torch.tensor([sample.prompt_ids + sample.question_ids + sample.target_ids])
    with torch.inference_mode():
        logits = loaded.model(ids, logits_to_keep=65).logits[0, :-1]
    assert 0.5 < nats_per_token(logits, torch.tensor(sample.target_ids)) < 4
