"""The real model answers and stops, and its tokenizer preserves text."""

import pytest

from kv_transformers.models import load_model, model_folder, resolve_model


@pytest.mark.model
def test_smollm2_answers_and_stops() -> None:
    loaded = load_model(device="cpu")
    prompt = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    config = loaded.model.generation_config
    assert loaded.tokenizer.convert_ids_to_tokens(config.eos_token_id) == "<|im_end|>"
    output = loaded.model.generate(**prompt, max_new_tokens=24, do_sample=False)
    said = output[0, prompt["input_ids"].shape[1] :].tolist()
    assert "Paris" in loaded.tokenizer.decode(said)
    assert said[-1] == config.eos_token_id


@pytest.mark.model
def test_smollm2_tokenizer() -> None:
    source = resolve_model()
    assert source.path is not None
    folder = model_folder()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Don't   panic: 42 + 1,234 = naïve? <|im_start|>\n\n\tΩ 日本"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 49152
    digits = set("0123456789")
    ascii_digits = [token for token in tokenizer.get_vocab() if digits & set(token)]
    assert set(ascii_digits) == digits  # every digit is a token of its own
