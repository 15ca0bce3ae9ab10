"""Retrieval: numbers hidden in a long text, one of them asked for.

The idea is the needle-in-a-haystack test (Kamradt, 2023) and its variant with several keyed needles
(RULER, arXiv:2404.06654); the wording is our own.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_serve.tasks.prompt import Frame, Haystack, fit
from kv_serve.tasks.sample import Sample, Setting, TaskError, TaskName
from kv_serve.tasks.text import Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DIGITS = 7
NEW_TOKENS = 16
SLACK = 16  # tokens that the last prompt of a text may fall short of its length
KEYS = ("harbor", "violin", "meadow", "glacier", "lantern", "orchard", "compass", "pepper")

INTRO = "A special magic number is hidden in the text below. Find it and remember it."
NEEDLE = "The special magic number is {number}."
QUESTION = "What is the special magic number?"
ANSWER = "The special magic number is"

KEYED_INTRO = "Special magic numbers are hidden in the text below. Find them and remember them."
KEYED_NEEDLE = "The special magic number for {key} is {number}."
KEYED_QUESTION = "What is the special magic number for {key}?"
KEYED_ANSWER = "The special magic number for {key} is"


@dataclass(frozen=True, slots=True)
class _Puzzle:
    intro: str
    hidden: tuple[tuple[float, str], ...]
    question: str
    opening: str
    answer: str
    depth: float


def needle(
    tokenizer: "PreTrainedTokenizerBase",
    text: Text,
    *,
    length: int,
    samples: int,
    setting: Setting,
    seed: int = 0,
) -> tuple[Sample, ...]:
    """Prompts with one seven-digit number each, at depths spread evenly from start to end.

    The same seed hides the same numbers in the same places for both settings.

    Args:
        tokenizer: The model's; its chat template is used where it has one.
        text: Where the haystack is cut from, at a random sentence.
        length: Tokens of prompt and question; a prompt falls short by at most a word.
        samples: How many prompts.
        setting: Whether the question is in the compressed prompt or comes after it.
        seed: Of the numbers and of the places in the text.

    Raises:
        TaskError: the length leaves no room for the wording, or the text is too short for it.
    """
    puzzles = []
    for i in range(samples):
        random_ = random.Random(f"needle {seed} {i}")
        number, depth = _number(random_), (i + 0.5) / samples
        hidden = ((depth, NEEDLE.format(number=number)),)
        puzzles.append(_Puzzle(INTRO, hidden, QUESTION, ANSWER, number, depth))
    return _samples("needle", tokenizer, text, length, setting, seed, puzzles)


def multikey(
    tokenizer: "PreTrainedTokenizerBase",
    text: Text,
    *,
    length: int,
    samples: int,
    setting: Setting,
    seed: int = 0,
    keys: int = 4,
) -> tuple[Sample, ...]:
    """Prompts with several numbers, each under a word of its own, one of which is asked for.

    The numbers stand in equal parts of the text, one a part; which one is asked goes round.

    Args:
        tokenizer: As for `needle`.
        text: As for `needle`.
        length: As for `needle`.
        samples: As for `needle`.
        setting: As for `needle`.
        seed: As for `needle`.
        keys: How many numbers, 2 to 8.

    Raises:
        TaskError: as for `needle`, or `keys` is out of range.
    """
    if not 2 <= keys <= len(KEYS):
        raise TaskError(f"keys={keys}: multikey hides 2 to {len(KEYS)} numbers")
    puzzles = []
    for i in range(samples):
        random_ = random.Random(f"multikey {seed} {i}")
        names = random_.sample(KEYS, keys)
        numbers = [_number(random_) for _ in names]
        depths = [(j + 0.1 + 0.8 * random_.random()) / keys for j in range(keys)]
        hidden = tuple(
            (depth, KEYED_NEEDLE.format(key=name, number=number))
            for depth, name, number in zip(depths, names, numbers, strict=True)
        )
        asked = i % keys
        question = KEYED_QUESTION.format(key=names[asked])
        opening = KEYED_ANSWER.format(key=names[asked])
        puzzles.append(
            _Puzzle(KEYED_INTRO, hidden, question, opening, numbers[asked], depths[asked])
        )
    return _samples("multikey", tokenizer, text, length, setting, seed, puzzles)


def _number(random_: random.Random) -> str:
    """Digits that all differ: a small model that copies 1474787 loses its place, with any cache."""
    return "".join(random_.sample("123456789", DIGITS))


def _samples(
    task: TaskName,
    tokenizer: "PreTrainedTokenizerBase",
    text: Text,
    length: int,
    setting: Setting,
    seed: int,
    puzzles: Sequence[_Puzzle],
) -> tuple[Sample, ...]:
    if not puzzles:
        raise TaskError(f"samples=0: {task} needs at least 1")
    frame, haystack = Frame.of(tokenizer), Haystack.of(text)
    return tuple(
        _sample(task, frame, haystack, length, setting, random.Random(f"text {seed} {i}"), puzzle)
        for i, puzzle in enumerate(puzzles)
    )


def _sample(
    task: TaskName,
    frame: Frame,
    haystack: Haystack,
    length: int,
    setting: Setting,
    random_: random.Random,
    puzzle: _Puzzle,
) -> Sample:
    begin = haystack.choose(random_, length)
    question = f"\n\n{puzzle.question}{frame.tail}{puzzle.opening}"

    def encode(count: int) -> tuple[list[int], list[int]]:
        body = haystack.with_hidden(begin, count, puzzle.hidden)
        return frame.encode(f"{frame.head}{puzzle.intro}\n\n{body}", question)

    def cost(count: int) -> int:
        return sum(map(len, encode(count)))

    available = len(haystack.words) - begin
    count = fit(cost, length, available)
    if count < 0:
        raise TaskError(
            f"length={length}: {task} needs {cost(0)} tokens for its wording alone with this"
            " tokenizer; ask for more"
        )
    prompt, rest = encode(count)
    total = len(prompt) + len(rest)
    if count == available and total < length - SLACK:
        raise TaskError(
            f"the text {haystack.name} gives a prompt of {total} tokens, fewer than"
            f" length={length}; give a longer text"
        )
    if setting == "aware":
        prompt, rest = [*prompt, *rest[:-1]], rest[-1:]
    return Sample(
        task=task,
        setting=setting,
        prompt_ids=tuple(prompt),
        question_ids=tuple(rest),
        answer=puzzle.answer,
        depth=puzzle.depth,
        new_tokens=NEW_TOKENS,
    )
