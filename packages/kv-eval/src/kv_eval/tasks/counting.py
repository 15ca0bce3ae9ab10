"""Counting: the most frequent words of a list.

The idea is common words extraction (RULER, arXiv:2404.06654); the wording is our own. Unlike a
needle, the answer is spread over the whole prompt.
"""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kv_eval.tasks.puzzle import Puzzle, posed
from kv_eval.tasks.sample import Sample, Setting, TaskError, TaskName
from kv_eval.tasks.text import Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INTRO = "Below is a numbered list of words. Some words stand in it far more often than the others."
QUESTION = "Which {count} words stand most often in the list?"
OPENING = "The {count} words that stand most often in the list are:"
RARE = 3  # occurrences of other words, as in RULER
TOKENS_OF_WORD = 8  # maximum tokens of a word and its number
WORD_LETTERS = range(4, 10)


def common_words(
    tokenizer: "PreTrainedTokenizerBase",
    text: Text,
    *,
    length: int,
    samples: int,
    setting: Setting,
    seed: int = 0,
    common: int = 10,
    often: int = 30,
) -> tuple[Sample, ...]:
    """Create prompts that list words: `common` of them occur `often` times, others 3 times.

    The score is the share of the common words in the answer. The words are taken from the text; the
    number of rare ones follows from the length.

    Args:
        tokenizer: The model's; its chat template is used if it has one.
        text: Source of the words: plain ones of 4 to 9 letters.
        length: Tokens of prompt and question; a prompt is at most a few words shorter.
        samples: Number of prompts.
        setting: Whether the question is in the compressed prompt or follows it.
        seed: Of the words and of their order.
        common: Number of frequent words, at least 1.
        often: Their number of occurrences, more than 3.

    Raises:
        TaskError: a number is out of range, the length is too small for the common words, or the
            text has too few words.
    """
    words = plain_words(text)
    puzzles = counted(
        "common-words", text.name, words, samples, seed=seed, common=common, often=often
    )
    return posed("common-words", tokenizer, puzzles, length=length, setting=setting)


def counted(
    task: TaskName,
    source: str,
    words: Sequence[str],
    samples: int,
    *,
    seed: int,
    common: int,
    often: int,
) -> list[Puzzle]:
    """Create the puzzles of `common_words`, whose arguments these are, from words of `source`.

    Raises:
        TaskError: a number is out of range, or there are too few words.
    """
    if common < 1 or often <= RARE:
        raise TaskError(
            f"common={common}, often={often}: {task} needs at least 1 word with more than"
            f" {RARE} occurrences"
        )
    if len(words) <= common:
        raise TaskError(
            f"the text {source} has {len(words)} plain words of 4 to 9 letters; {task}"
            f" needs more than {common}"
        )
    puzzles = []
    for i in range(samples):
        random_ = random.Random(f"{task} {seed} {i}")
        drawn = random_.sample(words, len(words))
        answers, rare = tuple(drawn[:common]), drawn[common:]
        order = random_.random()

        def body(
            count: int,
            answers: tuple[str, ...] = answers,
            rare: list[str] = rare,
            order: float = order,
        ) -> str:
            listed = [*answers * often, *rare[:count] * RARE]
            random.Random(order).shuffle(listed)
            return " ".join(f"{place}. {word}" for place, word in enumerate(listed, 1))

        puzzles.append(
            Puzzle(
                intro=INTRO,
                body=body,
                available=len(rare),
                source=source,
                question=QUESTION.format(count=common),
                opening=OPENING.format(count=common),
                answers=answers,
                depth=0.5,
                new_tokens=TOKENS_OF_WORD * common,
            )
        )
    return puzzles


def plain_words(text: Text) -> list[str]:
    """Return the distinct plain words of 4 to 9 letters of a text, sorted."""
    return sorted({word for word in _words(text) if len(word) in WORD_LETTERS})


def _words(text: Text) -> set[str]:
    found = {word for paragraph in text.paragraphs for word in paragraph.split()}
    return {word for word in found if word.isascii() and word.isalpha() and word.islower()}
