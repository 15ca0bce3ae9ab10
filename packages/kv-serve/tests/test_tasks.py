"""Prompts of an exact make, their scores, and the full cache's own results on the real model."""

import itertools
import math
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kv_serve.tasks import (
    Sample,
    TaskError,
    Text,
    agreement,
    agreement_share,
    default_text,
    found,
    multikey,
    nats_per_token,
    needle,
    nll,
    read_text,
)
from kv_serve.tasks.prompt import fit

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
WORDS = ("some", "plain", "words", "of", "no", "account,", "which", "needles", "hide", "among;")


def byte_tokenizer(
    template: str | None = TEMPLATE, *, bos: bool = False
) -> PreTrainedTokenizerFast:
    """A token a byte, so that lengths can be counted by hand."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*alphabet, "<bos>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>" if bos else None)
    fast.chat_template = template
    return fast


def plain_text(words: int = 4000) -> Text:
    random_ = random.Random(0)
    sentences, left = [], words
    while left > 0:
        size = random_.randrange(5, 25)
        sentences.append(" ".join(random_.choices(WORDS, k=size)).capitalize() + ".")
        left -= size
    return Text("plain", tuple(" ".join(sentences[i : i + 7]) for i in range(0, len(sentences), 7)))


TOKENIZER = byte_tokenizer()
TEXT = plain_text()


def shown(sample: Sample, tokenizer: PreTrainedTokenizerBase = TOKENIZER) -> tuple[str, str]:
    return tokenizer.decode(sample.prompt_ids), tokenizer.decode(sample.question_ids)


# Hidden numbers


@settings(deadline=None, max_examples=15)
@given(
    length=st.integers(700, 5000),
    samples=st.integers(1, 4),
    seed=st.integers(0, 10**9),
    task=st.sampled_from([needle, multikey]),
)
def test_prompts_have_their_length_and_one_answer(length, samples, seed, task) -> None:
    options = {"length": length, "samples": samples, "seed": seed}
    aware = task(TOKENIZER, TEXT, setting="aware", **options)
    agnostic = task(TOKENIZER, TEXT, setting="agnostic", **options)
    assert aware == task(TOKENIZER, TEXT, setting="aware", **options)
    assert len(aware) == len(agnostic) == samples
    for one, other in zip(aware, agnostic, strict=True):
        assert length - 16 < one.length <= length
        assert one.prompt_ids + one.question_ids == other.prompt_ids + other.question_ids
        assert one.answer == other.answer
        assert len(one.question_ids) == 1
        prompt, question = shown(other)
        assert prompt.count(one.answer) == 1
        assert one.answer not in question
        assert "What is" in question
        assert "What is" not in prompt
        assert len(one.answer) == len(set(one.answer)) == 7
        assert (one.setting, other.setting) == ("aware", "agnostic")
        assert not one.target_ids
        assert one.stop
        assert one.new_tokens > 7


def test_needle_stands_in_the_template_at_its_depth() -> None:
    samples = needle(TOKENIZER, TEXT, length=3000, samples=10, setting="agnostic")
    assert [s.depth for s in samples] == pytest.approx([0.05 + 0.1 * i for i in range(10)])
    for sample in samples:
        prompt, question = shown(sample)
        assert prompt.startswith("<|user|>A special magic number is hidden")
        hidden = f" The special magic number is {sample.answer}. "
        assert hidden in f"{prompt} "
        assert question == (
            "\n\nWhat is the special magic number?<|end|><|assistant|>\nThe special magic number is"
        )
        body = prompt.partition("\n\n")[2]
        assert body.index(sample.answer) / len(body) == pytest.approx(sample.depth, abs=0.04)


def test_seeds_change_numbers_and_places() -> None:
    first, second = (
        needle(TOKENIZER, TEXT, length=1500, samples=3, setting="aware", seed=seed)
        for seed in (0, 1)
    )
    assert not {s.answer for s in first} & {s.answer for s in second}
    bodies = {shown(s)[0].partition("\n\n")[2][:40] for s in (*first, *second)}
    assert len(bodies) > 3


@pytest.mark.parametrize("keys", [2, 4, 8])
def test_multikey_asks_for_each_in_turn(keys: int) -> None:
    samples = multikey(TOKENIZER, TEXT, length=3000, samples=8, setting="agnostic", keys=keys)
    asked = []
    for sample in samples:
        prompt, question = shown(sample)
        parts = prompt.split("The special magic number for ")[1:]
        numbers = {part.split()[0]: part.split()[2].rstrip(".") for part in parts}
        assert len(numbers) == len(set(numbers.values())) == keys
        key = question.partition("number for ")[2].partition("?")[0]
        assert numbers[key] == sample.answer
        assert question.endswith(f"The special magic number for {key} is")
        asked.append(list(numbers).index(key))
    assert asked == [i % keys for i in range(8)]


def test_tokenizer_without_a_template() -> None:
    tokenizer = byte_tokenizer(None, bos=True)
    (sample,) = needle(tokenizer, TEXT, length=900, samples=1, setting="agnostic")
    assert sample.prompt_ids[0] == tokenizer.bos_token_id
    assert sample.prompt_ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.bos_token_id not in sample.question_ids
    _, question = shown(sample, tokenizer)
    assert question == "\n\nWhat is the special magic number?\n\nThe special magic number is"


def test_text_without_full_stops_still_hides_a_number() -> None:
    text = Text("endless", (" ".join(WORDS * 300).replace(".", ""),))
    depths = []
    for sample in needle(TOKENIZER, text, length=6000, samples=5, setting="agnostic"):
        body = shown(sample)[0].partition("\n\n")[2]
        depths.append(body.index(sample.answer) / len(body))
    assert depths == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9], abs=0.05)


def test_refusals_of_hidden_numbers() -> None:
    def refused(words: str, **options: object) -> None:
        given_ = {"length": 900, "samples": 1, "setting": "aware"} | options
        with pytest.raises(TaskError, match=words):
            multikey(TOKENIZER, given_.pop("text", TEXT), **given_)

    refused("needs .* tokens for its wording alone", length=100)
    refused("fewer than length=90000; give a longer text", length=90000)
    refused("give a longer text", text=plain_text(50))
    refused("hides 2 to 8 numbers", keys=1)
    refused("hides 2 to 8 numbers", keys=9)
    refused("needs at least 1", samples=0)
    silent = byte_tokenizer("{{ 'nothing' }}")
    with pytest.raises(TaskError, match="does not show the user's message"):
        needle(silent, TEXT, length=900, samples=1, setting="aware")


@given(room=st.integers(0, 300), available=st.integers(0, 80), steps=st.data())
def test_fit_is_the_largest(room: int, available: int, steps: st.DataObject) -> None:
    sizes = steps.draw(st.lists(st.integers(1, 9), min_size=available, max_size=available))
    frame = steps.draw(st.integers(0, 40))

    def cost(count: int) -> int:
        return frame + sum(sizes[:count])

    fitting = [count for count in range(available + 1) if cost(count) <= room]
    assert fit(cost, room, available) == (fitting[-1] if fitting else -1)


# Windows of text


@settings(deadline=None, max_examples=30)
@given(
    length=st.integers(2, 400),
    samples=st.integers(1, 6),
    seed=st.integers(0, 10**9),
    continuation=st.integers(1, 50),
    bos=st.booleans(),
)
def test_nll_windows_are_stretches_of_the_text(length, samples, seed, continuation, bos) -> None:
    tokenizer = byte_tokenizer(bos=bos)
    options = {"length": length, "samples": samples, "seed": seed, "continuation": continuation}
    made = nll(tokenizer, TEXT, **options)
    assert made == nll(tokenizer, TEXT, **options)
    ends = [0]
    for sample in made:
        assert sample.length == length
        assert len(sample.question_ids) == 1
        assert len(sample.target_ids) == continuation
        window = sample.prompt_ids + sample.question_ids + sample.target_ids
        if bos:
            assert window[0] == tokenizer.bos_token_id
            window = window[1:]
        assert (sample.setting, sample.new_tokens, sample.answer) == ("agnostic", 0, "")
        begin = TEXT.body.index(tokenizer.decode(window))
        ends.append(begin + len(window))
    if samples * (length + continuation) < 10_000:  # short windows recur in so plain a text
        assert max(ends) <= len(TEXT.body)


def test_windows_do_not_overlap_while_there_is_room() -> None:
    text = Text("numbered", tuple(f"{i:06d}" for i in range(2000)))
    made = nll(TOKENIZER, text, length=1000, samples=10, continuation=256, seed=3)
    begins = [int(TOKENIZER.decode(s.prompt_ids).split("\n")[1]) * 7 for s in made]
    steps = [b - a for a, b in itertools.pairwise(begins)]
    assert min(steps) >= 1256 - 7
    assert begins[-1] + 1256 <= len(text.body)


def test_agreement_windows_go_on_past_the_end_of_text() -> None:
    made = agreement(TOKENIZER, TEXT, length=300, samples=4, new_tokens=32)
    assert [s.length for s in made] == [300] * 4
    assert {(s.new_tokens, s.stop, s.target_ids) for s in made} == {(32, False, ())}
    assert all(TOKENIZER.decode(s.prompt_ids) in TEXT.body for s in made)


def test_refusals_of_windows() -> None:
    for task in (nll, agreement):
        with pytest.raises(TaskError, match="at least 2 tokens"):
            task(TOKENIZER, TEXT, length=1, samples=1)
        with pytest.raises(TaskError, match="needs at least 1"):
            task(TOKENIZER, TEXT, length=20, samples=0)
        with pytest.raises(TaskError, match="give a longer text or a smaller length"):
            task(TOKENIZER, TEXT, length=10**6, samples=1)
    with pytest.raises(TaskError, match="continuation=0"):
        nll(TOKENIZER, TEXT, length=20, samples=1, continuation=0)
    with pytest.raises(TaskError, match="new_tokens=0"):
        agreement(TOKENIZER, TEXT, length=20, samples=1, new_tokens=0)


def test_sample_needs_something_to_compress_and_to_feed() -> None:
    with pytest.raises(TaskError, match="to compress"):
        Sample("needle", "aware", (), (1,))
    with pytest.raises(TaskError, match="to feed after"):
        Sample("needle", "aware", (1,), ())


# Texts


def test_default_text_is_long_english_prose() -> None:
    text = default_text()
    assert text == default_text()
    assert len(text.body) > 100_000
    assert len(set(text.paragraphs)) == len(text.paragraphs)
    letters = sum(letter.isalpha() or letter.isspace() for letter in text.body)
    assert letters / len(text.body) > 0.9
    assert not any(line.startswith(("*", " ", "-")) for line in text.paragraphs)
    assert max(len(piece) for piece in text.pieces()) <= 60


def test_file_becomes_paragraphs(tmp_path: Path) -> None:
    file = tmp_path / "some.txt"
    file.write_bytes('\ufeffOne line\r\ngoes on. "Two!" he said.\r\n \r\n\r\nThree?'.encode())
    text = read_text(file)
    assert text.name == "some.txt"
    assert text.paragraphs == ('One line goes on. "Two!" he said.', "Three?")
    pieces = [" ".join(piece) for piece in text.pieces()]
    assert pieces == ["One line goes on.", '"Two!"', "he said.", "Three?"]
    assert read_text(file).digest == text.digest
    assert Text("some.txt", ("other",)).digest != text.digest


def test_bad_text_files(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="No such file"):
        read_text(tmp_path / "missing.txt")
    with pytest.raises(TaskError, match="cannot read"):
        read_text(tmp_path)
    file = tmp_path / "bad.txt"
    file.write_bytes(b"\xff\xfe\x00latin")
    with pytest.raises(TaskError, match="is not UTF-8"):
        read_text(file)
    file.write_text(" \n\n \n")
    with pytest.raises(TaskError, match="holds no words"):
        read_text(file)


# Scores


@pytest.mark.parametrize(
    ("said", "right"),
    [
        (" 4821396.", True),
        ('The number is "4821396"', True),
        ("4,821,396", True),
        ("4 821 396 it is", True),
        ("482139", False),
        ("14821396", False),
        ("48213960", False),
        ("4,821,3967", False),
        ("", False),
    ],
)
def test_found(said: str, right: bool) -> None:
    assert found(said, "4821396") is right


@given(
    length=st.integers(1, 9),
    vocabulary=st.integers(2, 30),
    scale=st.floats(0.1, 50),
    seed=st.integers(0, 2**31),
)
def test_nats_against_their_definition(length, vocabulary, scale, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(length, vocabulary, generator=generator) * scale
    targets = torch.randint(vocabulary, (length,), generator=generator)
    rows = logits.double().tolist()
    expected = [
        math.log(math.fsum(math.exp(value - row[target]) for value in row))
        for row, target in zip(rows, targets.tolist(), strict=True)
    ]
    assert nats_per_token(logits, targets) == pytest.approx(math.fsum(expected) / length, abs=1e-9)


def test_agreement_share() -> None:
    assert agreement_share([1, 2, 3, 4], [1, 2, 3, 4]) == 1
    assert agreement_share([1, 2, 9, 4], [1, 2, 3, 4]) == 0.75
    assert agreement_share([1, 2], [1, 2, 3, 4]) == 0.5
    assert agreement_share([1, 2, 3, 4, 5, 6], [1, 2]) == 1
    assert agreement_share([], [1]) == 0
    with pytest.raises(ValueError, match="at least one"):
        agreement_share([1], [])


# The real model with transformers' own cache


def answer(loaded, sample: Sample) -> str:
    """Prefill, question, greedy decoding: what an evaluator does, under the full cache."""
    from transformers import DynamicCache

    model = loaded.model
    cache = DynamicCache(config=model.config)
    said: list[int] = []
    with torch.inference_mode():
        model(torch.tensor([sample.prompt_ids]), past_key_values=cache, logits_to_keep=1)
        fed = torch.tensor([sample.question_ids])
        while len(said) < sample.new_tokens:
            token = int(model(fed, past_key_values=cache, logits_to_keep=1).logits[0, -1].argmax())
            if sample.stop and token == model.generation_config.eos_token_id:
                break
            said.append(token)
            fed = torch.tensor([[token]])
    return loaded.tokenizer.decode(said)


@pytest.mark.model
def test_smollm2_finds_every_needle_at_2000_tokens() -> None:
    from kv_serve.models import load_model

    loaded = load_model(dtype="bfloat16", device="cpu")
    samples = needle(loaded.tokenizer, default_text(), length=2000, samples=10, setting="agnostic")
    assert all(1990 < sample.length <= 2000 for sample in samples)
    answers = {sample.answer: answer(loaded, sample) for sample in samples}
    assert {number: text for number, text in answers.items() if not found(text, number)} == {}


@pytest.mark.model
def test_smollm2_settings_feed_the_same_tokens() -> None:
    from kv_serve.models import load_model

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
    from kv_serve.models import load_model

    loaded = load_model(dtype="float32", device="cpu")
    (sample,) = nll(loaded.tokenizer, default_text(), length=512, samples=1, continuation=64)
    ids = torch.tensor([sample.prompt_ids + sample.question_ids + sample.target_ids])
    with torch.inference_mode():
        logits = loaded.model(ids, logits_to_keep=65).logits[0, :-1]
    assert 0.5 < nats_per_token(logits, torch.tensor(sample.target_ids)) < 4
