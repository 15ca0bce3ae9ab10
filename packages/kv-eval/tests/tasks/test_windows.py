"""Windows of a text: where they lie, what of them is judged, and what is refused."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_eval.tasks import Sample, TaskError, Text, agreement, nll
from task_text import TEXT, TOKENIZER, byte_tokenizer


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
        assert (sample.setting, sample.new_tokens, sample.answers) == ("agnostic", 0, ())
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
        with pytest.raises(TaskError, match="use a longer text or a smaller length"):
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
