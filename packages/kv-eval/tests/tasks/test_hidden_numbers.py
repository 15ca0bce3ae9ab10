"""Prompts that hide numbers have an exact length, one answer, and both settings the same tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_eval.tasks import TaskError, Text, multikey, needle
from kv_eval.tasks.prompt import fit
from task_text import TEXT, TOKENIZER, WORDS, byte_tokenizer, plain_text, shown


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
        assert one.answers[0] == other.answers[0]
        assert len(one.question_ids) == 1
        prompt, question = shown(other)
        assert prompt.count(one.answers[0]) == 1
        assert one.answers[0] not in question
        assert "What is" in question
        assert "What is" not in prompt
        assert len(one.answers[0]) == len(set(one.answers[0])) == 7
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
        hidden = f" The special magic number is {sample.answers[0]}. "
        assert hidden in f"{prompt} "
        assert question == (
            "\n\nWhat is the special magic number?<|end|><|assistant|>\nThe special magic number is"
        )
        body = prompt.partition("\n\n")[2]
        assert body.index(sample.answers[0]) / len(body) == pytest.approx(sample.depth, abs=0.04)


def test_seeds_change_numbers_and_places() -> None:
    first, second = (
        needle(TOKENIZER, TEXT, length=1500, samples=3, setting="aware", seed=seed)
        for seed in (0, 1)
    )
    assert not {s.answers[0] for s in first} & {s.answers[0] for s in second}
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
        assert numbers[key] == sample.answers[0]
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
        depths.append(body.index(sample.answers[0]) / len(body))
    assert depths == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9], abs=0.05)


def test_refusals_of_hidden_numbers() -> None:
    def refused(words: str, **options: object) -> None:
        given_ = {"length": 900, "samples": 1, "setting": "aware"} | options
        with pytest.raises(TaskError, match=words):
            multikey(TOKENIZER, given_.pop("text", TEXT), **given_)

    refused("needs .* tokens for its wording alone", length=100)
    refused("fewer than length=90000; use a longer text", length=90000)
    refused("use a longer text", text=plain_text(50))
    refused("hides 2 to 8 numbers", keys=1)
    refused("hides 2 to 8 numbers", keys=9)
    refused("needs at least 1", samples=0)
    silent = byte_tokenizer("{{ 'nothing' }}")
    with pytest.raises(TaskError, match="omits the user's message"):
        needle(silent, TEXT, length=900, samples=1, setting="aware")


@given(room=st.integers(0, 300), available=st.integers(0, 80), steps=st.data())
def test_fit_is_the_largest(room: int, available: int, steps: st.DataObject) -> None:
    sizes = steps.draw(st.lists(st.integers(1, 9), min_size=available, max_size=available))
    frame = steps.draw(st.integers(0, 40))

    def cost(count: int) -> int:
        return frame + sum(sizes[:count])

    fitting = [count for count in range(available + 1) if cost(count) <= room]
    assert fit(cost, room, available) == (fitting[-1] if fitting else -1)
