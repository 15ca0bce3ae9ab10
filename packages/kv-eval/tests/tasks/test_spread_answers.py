"""Prompts whose answers are several, or said in a text without any sense."""

import re
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_eval.tasks import TaskError, Text, common_words, found_share, passkey, variable_tracking
from task_text import TEXT, TOKENIZER, plain_text, shown

VARIED = Text(
    "varied", (" ".join(f"word{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(600)),)
)


@settings(deadline=None, max_examples=10)
@given(length=st.integers(700, 4000), samples=st.integers(1, 3), seed=st.integers(0, 10**9))
def test_both_settings_feed_the_same_tokens(length: int, samples: int, seed: int) -> None:
    options = {"length": length, "samples": samples, "seed": seed}
    for make in (passkey, lambda t, **o: variable_tracking(t, TEXT, **o)):
        aware, agnostic = (make(TOKENIZER, setting=s, **options) for s in ("aware", "agnostic"))
        assert aware == make(TOKENIZER, setting="aware", **options)
        for one, other in zip(aware, agnostic, strict=True):
            assert length - 100 < one.length <= length
            assert one.prompt_ids + one.question_ids == other.prompt_ids + other.question_ids
            assert one.answers == other.answers
            prompt, question = shown(other)
            assert all(prompt.count(answer) >= 1 for answer in one.answers)
            assert not any(answer in question for answer in one.answers)


def test_a_pass_key_is_said_twice_in_a_dull_text() -> None:
    samples = passkey(TOKENIZER, length=2000, samples=5, setting="agnostic")
    for sample in samples:
        prompt, question = shown(sample)
        (number,) = sample.answers
        assert f"The pass key is {number}. Remember it: {number} is the pass key." in prompt
        assert prompt.count("The road is long.") > 10
        assert question.endswith("What is the pass key?<|end|><|assistant|>\nThe pass key is")
        body = prompt.partition("\n\n")[2]
        assert body.index(number) / len(body) == pytest.approx(sample.depth, abs=0.08)
    assert len({sample.answers for sample in samples}) == 5


@pytest.mark.parametrize("hops", [1, 4, 6])
def test_a_value_is_handed_on_in_order(hops: int) -> None:
    options = {"length": 3000, "samples": 4, "setting": "agnostic", "hops": hops}
    for sample in variable_tracking(TOKENIZER, TEXT, **options):
        prompt, question = shown(sample)
        (first,) = re.findall(r"VAR ([A-Z]{4}) = (\d{7})\.", prompt)
        links = re.findall(r"VAR ([A-Z]{4}) = VAR ([A-Z]{4})\.", prompt)
        names = (first[0], *(name for name, _ in links))
        assert sample.answers == names
        assert len(set(names)) == hops + 1
        assert [before for _, before in links] == list(names[:-1])
        places = [prompt.index(f"VAR {name} =") for name in names]
        assert all(one < other for one, other in pairwise(places))
        assert f"have the value {first[1]}, directly" in question
        assert sample.new_tokens == 8 * (hops + 1)


def test_the_common_words_are_the_most_frequent() -> None:
    length = 6000
    for setting in ("aware", "agnostic"):
        samples = common_words(TOKENIZER, VARIED, length=length, samples=3, setting=setting)
        for sample in samples:
            text = TOKENIZER.decode(sample.prompt_ids + sample.question_ids)
            listed = re.findall(r"\d+\. (\w+)", text)
            counts = Counter(listed)
            assert {word for word, count in counts.items() if count == 30} == set(sample.answers)
            assert len(sample.answers) == 10
            assert {count for word, count in counts.items() if word not in sample.answers} == {3}
            assert length - 50 < sample.length <= length
            numbers = [int(n) for n in re.findall(r"(\d+)\. \w+", text)]
            assert numbers == list(range(1, len(listed) + 1))
    assert samples[0].answers != samples[1].answers
    assert "Which 10 words stand most often in the list?" in shown(samples[0])[1]


def test_seeds_change_what_is_asked() -> None:
    options = {"length": 6000, "samples": 1, "setting": "aware"}
    for make, text in ((variable_tracking, TEXT), (common_words, VARIED)):
        (one,), (other,) = (make(TOKENIZER, text, seed=seed, **options) for seed in (0, 1))
        assert one.answers != other.answers


@pytest.mark.parametrize(
    ("said", "share"),
    [
        ("KLMN, QRST and VWXZ.", 1.0),
        ("klmn, qrst", 2 / 3),
        ("KLMNO QRST", 1 / 3),
        ("nothing", 0.0),
    ],
)
def test_a_share_of_answers(said: str, share: float) -> None:
    assert found_share(said, ("KLMN", "QRST", "VWXZ")) == pytest.approx(share)


def test_refusals() -> None:
    sized = {"length": 3000, "samples": 1, "setting": "aware"}
    with pytest.raises(TaskError, match="hops=0: variable-tracking needs at least 1 hop"):
        variable_tracking(TOKENIZER, TEXT, hops=0, **sized)
    with pytest.raises(TaskError, match=r"passkey needs .* tokens for its wording alone"):
        passkey(TOKENIZER, **sized | {"length": 50})
    with pytest.raises(TaskError, match=r"common-words needs .* tokens for its wording alone"):
        common_words(TOKENIZER, VARIED, **sized | {"length": 500})
    with pytest.raises(TaskError, match="common=0, often=30"):
        common_words(TOKENIZER, VARIED, common=0, **sized)
    with pytest.raises(TaskError, match="common=10, often=3"):
        common_words(TOKENIZER, VARIED, often=3, **sized)
    with pytest.raises(TaskError, match="plain words of 4 to 9 letters; common-words needs more"):
        common_words(TOKENIZER, plain_text(), **sized)
    with pytest.raises(TaskError, match=r"the text varied is enough for a prompt of .* fewer than"):
        common_words(TOKENIZER, VARIED, **sized | {"length": 90_000})
    with pytest.raises(ValueError, match="needs at least one answer"):
        found_share("a", ())
