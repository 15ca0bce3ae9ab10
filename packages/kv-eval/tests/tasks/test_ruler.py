"""RULER's tasks: exact lengths, answers where they belong, and string match."""

import math
import re
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_eval.evaluate.plan import SETTINGS
from kv_eval.tasks import (
    RULER,
    RulerName,
    Sample,
    TaskError,
    Text,
    default_text,
    match_all,
    match_part,
    ruler_samples,
)
from kv_eval.tasks.hidden import NOISE
from task_text import TOKENIZER, byte_tokenizer, plain_text, shown

TEXT = default_text()
NIAH = tuple(task for task in RULER if task.startswith("niah"))
NEEDLE = re.compile(r"special magic (number|uuid)s? for (\S+) is ([\w-]+)\.")
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
MOST = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}  # tokens of an answer

tasks = pytest.mark.parametrize("task", RULER)


def some(task: RulerName, **options: object) -> tuple[Sample, ...]:
    given_ = {"length": 6000, "samples": 4, "setting": "agnostic"} | options
    return ruler_samples(task, TOKENIZER, given_.pop("text", TEXT), **given_)


@settings(deadline=None, max_examples=15)
@given(
    task=st.sampled_from(RULER),
    length=st.integers(2600, 6000),
    samples=st.integers(1, 3),
    seed=st.integers(0, 10**9),
)
def test_prompts_have_exactly_their_length_in_both_settings(
    task: RulerName, length: int, samples: int, seed: int
) -> None:
    options = {"length": length, "samples": samples, "seed": seed}
    aware, agnostic = (some(task, setting=setting, **options) for setting in SETTINGS)
    assert aware == some(task, setting="aware", **options)
    assert len(aware) == len(agnostic) == samples
    assert len({len(sample.prompt_ids) for sample in agnostic}) == 1
    for one, other in zip(aware, agnostic, strict=True):
        assert one.length == other.length == length
        assert len(one.question_ids) == 1
        assert one.prompt_ids + one.question_ids == other.prompt_ids + other.question_ids
        assert one.answers == other.answers
        assert 0 <= one.depth <= 1
        prompt, question = shown(other)
        assert not any(answer.lower() in question.lower() for answer in one.answers)
        assert all(answer.lower() in prompt.lower() for answer in one.answers)
        if task not in ("vt", "cwe", "fwe"):
            assert all(prompt.lower().count(answer.lower()) == 1 for answer in one.answers)


@tasks
def test_seeds_samples_and_answers_differ(task: RulerName) -> None:
    one, other = (some(task, seed=seed) for seed in (0, 1))
    assert len({sample.answers for sample in (*one, *other)}) == 8
    assert len({sample.prompt_ids for sample in (*one, *other)}) == 8
    for sample in one:
        assert sample.task == task
        assert sample.new_tokens == MOST.get(task, 128)
        assert sample.match == ("part" if task.startswith("qa") else "all")
        assert sample.stop


@pytest.mark.parametrize("task", NIAH)
def test_needles_are_those_of_the_task(task: RulerName) -> None:
    values = 4 if task == "niah_multivalue" else 1
    keys = {"niah_multikey_1": 4, "niah_multiquery": 4}.get(task, 1)
    for sample in some(task):
        prompt, question = shown(sample)
        hidden = {value: key for _, key, value in NEEDLE.findall(prompt)}
        owners = Counter(hidden.values())
        if task in ("niah_multikey_2", "niah_multikey_3"):
            assert len(owners) > 20
        else:
            assert len(owners) == keys
        assert set(owners.values()) == {values}
        asked = [key for key in owners if key in question]
        assert len(asked) == (4 if task == "niah_multiquery" else 1)
        assert set(sample.answers) == {value for value, key in hidden.items() if key in asked}
        ids = task in ("niah_single_3", "niah_multikey_3")
        assert all(bool(UUID.fullmatch(value)) == ids for value in hidden)
        assert all(bool(UUID.fullmatch(key)) == (task == "niah_multikey_3") for key in owners)
        assert question.endswith(" is" if len(sample.answers) == 1 else " are")


def test_haystacks_are_those_of_the_tasks() -> None:
    for task in NIAH:
        prompt, _ = shown(some(task)[0])
        dull = prompt.count(NOISE)
        if task == "niah_single_1":
            assert dull > 40
        elif task in ("niah_multikey_2", "niah_multikey_3"):
            body = prompt.partition("\n\n")[2].splitlines()[1:]
            assert all(NEEDLE.search(line) for line in body)
        else:
            assert dull == 0


@pytest.mark.parametrize("task", ["niah_single_1", "niah_single_2", "niah_multikey_2", "qa_1"])
def test_depths_are_spread_evenly(task: RulerName) -> None:
    samples = some(task, samples=5, length=12_000)
    assert [sample.depth for sample in samples] == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
    for sample in samples:
        body = shown(sample)[0].partition("\n\n")[2]
        assert body.index(sample.answers[0]) / len(body) == pytest.approx(sample.depth, abs=0.06)


def test_questions_about_one_of_several_keys_rotate() -> None:
    places = []
    for sample in some("niah_multikey_1", samples=8):
        values = [value for _, _, value in NEEDLE.findall(shown(sample)[0])]
        places.append(values.index(sample.answers[0]))
    assert places == [0, 1, 2, 3] * 2


def test_a_value_is_assigned_through_four_others() -> None:
    for sample in some("vt"):
        prompt, question = shown(sample)
        ((first, value),) = re.findall(r"VAR ([A-Z]{4}) = (\d{7})\.", prompt)
        links = re.findall(r"VAR ([A-Z]{4}) = VAR ([A-Z]{4})\.", prompt)
        assert sample.answers == (first, *(name for name, _ in links))
        assert [before for _, before in links] == list(sample.answers[:-1])
        assert len(set(sample.answers)) == 5
        assert value in question


@pytest.mark.parametrize(("length", "often"), [(3000, 21), (4096, 30), (9000, 30)])
def test_common_words_stand_thirty_times_and_fewer_in_short_prompts(
    length: int, often: int
) -> None:
    for sample in some("cwe", length=length, samples=2):
        prompt = shown(sample)[0]
        counts = Counter(re.findall(r"\d+\. (\w+)", prompt))
        assert {word for word, count in counts.items() if count == often} == set(sample.answers)
        assert {counts[word] for word in counts if word not in sample.answers} == {3}
        plain = Counter(re.findall(r"\w+", prompt.lower()))
        assert all(plain[word] == often for word in sample.answers), "in what fills the prompt"


def test_coded_words_are_in_a_zipf_distribution() -> None:
    for sample in some("fwe"):
        ranked = Counter(re.findall(r"(?<= )[a-z]{6}(?= )|\.\.\.", shown(sample)[0])).most_common()
        assert ranked[0][0] == "..."
        assert tuple(word for word, _ in ranked[1:4]) == sample.answers
        assert ranked[3][1] > ranked[4][1]
        for rank in range(2, 5):
            share = ranked[rank - 1][1] / ranked[0][1]
            assert share == pytest.approx(rank**-2, abs=2 / ranked[0][1] + 0.01)


@pytest.mark.parametrize("hops", [1, 2])
def test_a_question_needs_so_many_documents(hops: int) -> None:
    for sample in some("qa_1" if hops == 1 else "qa_2", length=9000):
        prompt, question = shown(sample)
        documents = re.split(r"Document \d+:\n", prompt)[1:]
        numbers = [int(each) for each in re.findall(r"Document (\d+):", prompt)]
        assert numbers == list(range(1, len(documents) + 1))
        (person,) = {word for word in re.findall(r"[A-Z][a-z]{5}\b", question) if word in prompt}
        (town,) = sample.answers
        (found,) = (each for each in documents if person in each)
        assert (town in found) == (hops == 1)
        if hops == 2:
            company = re.findall(r"company named (\w+)\.", found)[0]
            (other,) = (each for each in documents if company in each and each != found)
            assert town in other
            assert person not in other
        people = re.findall(r"(\w+) (?:was born|works for a)", prompt)
        towns = re.findall(r"town of (\w+)\.", prompt)
        names = [*people, *towns]
        assert len(set(names)) == len(names)
        assert len(people) == len(towns) > 10


def contained(generated: str, answers: tuple[str, ...]) -> list[bool]:
    """Search every answer letter by letter."""
    text = generated.lower()
    return [
        any(text[at : at + len(answer)] == answer.lower() for at in range(len(text) + 1))
        for answer in answers
    ]


@given(
    generated=st.text("abcAB1 \n", max_size=40),
    answers=st.lists(st.text("abAB1", min_size=1, max_size=3), min_size=1, max_size=5),
)
def test_string_match_is_that_of_the_oracle(generated: str, answers: list[str]) -> None:
    there = contained(generated, tuple(answers))
    assert match_all(generated, answers) == sum(there) / len(there)
    assert match_part(generated, answers) == float(any(there))


def test_string_match_is_of_letters_not_of_words() -> None:
    assert match_all("It is 12345678.", ("1234567",)) == 1.0
    assert match_all("KLMN, qrst", ("klmn", "QRST", "VWXZ")) == pytest.approx(2 / 3)
    assert match_part("KLMN", ("klmn", "QRST")) == 1.0
    assert match_part("nothing", ("klmn", "QRST")) == 0.0
    for match in (match_all, match_part):
        with pytest.raises(ValueError, match="needs at least one answer"):
            match("a", ())


@tasks
def test_a_length_without_room_for_the_wording_is_refused(task: RulerName) -> None:
    said = rf"length=100: {task} needs \d+ tokens for its wording alone with this tokenizer; use a"
    with pytest.raises(TaskError, match=said):
        some(task, length=100)


def test_other_refusals() -> None:
    with pytest.raises(TaskError, match="samples=0: vt needs at least 1"):
        some("vt", samples=0)
    with pytest.raises(TaskError, match=r"6 plain words of 4 to 9 letters, too few for \d+"):
        some("niah_multikey_2", text=plain_text())
    with pytest.raises(TaskError, match="plain words of 4 to 9 letters; cwe needs more than 10"):
        some("cwe", text=plain_text())
    short = Text("short", TEXT.paragraphs[:20])
    with pytest.raises(TaskError, match=r"short is enough for a prompt of \d+ tokens of niah_sing"):
        some("niah_single_2", text=short, length=50_000)
    with pytest.raises(TaskError, match=r"is enough for a prompt of .* tokens of cwe, fewer than"):
        some("cwe", text=short, length=50_000)


def test_a_tokenizer_without_a_template_and_with_a_first_token() -> None:
    tokenizer = byte_tokenizer(None, bos=True)
    first = tokenizer.encode("")[0]
    for task in RULER:
        (sample,) = ruler_samples(task, tokenizer, TEXT, length=4000, samples=1, setting="agnostic")
        assert sample.length == 4000
        assert sample.prompt_ids[0] == first
        assert first not in (*sample.prompt_ids[1:], *sample.question_ids)


def test_links_of_a_chain_are_in_order() -> None:
    for sample in some("vt"):
        prompt, _ = shown(sample)
        places = [prompt.index(f"VAR {name} =") for name in sample.answers]
        assert all(one < other for one, other in pairwise(places))
        assert math.isclose(sample.depth, 0.0)
