"""Retrieval: sentences hidden in a long text, with a question about one or all of them.

The ideas are the needle-in-a-haystack test (Kamradt, 2023), its variant with several keyed needles
and variable tracking (RULER, arXiv:2404.06654), and passkey retrieval (Mohtashami and Jaggi,
arXiv:2305.16300); the wording is our own.
"""

import random
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from kv_eval.tasks.prompt import Haystack
from kv_eval.tasks.puzzle import Puzzle, posed
from kv_eval.tasks.sample import Sample, Setting, TaskError, TaskName
from kv_eval.tasks.text import Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DIGITS = 7
NEW_TOKENS = 16
KEYS = ("harbor", "violin", "meadow", "glacier", "lantern", "orchard", "compass", "pepper")

INTRO = "A special magic number is hidden in the text below. Find it and remember it."
NEEDLE = "The special magic number is {number}."
QUESTION = "What is the special magic number?"
ANSWER = "The special magic number is"

KEYED_INTRO = "Special magic numbers are hidden in the text below. Find them and remember them."
KEYED_NEEDLE = "The special magic number for {key} is {number}."
KEYED_QUESTION = "What is the special magic number for {key}?"
KEYED_ANSWER = "The special magic number for {key} is"

PASS_INTRO = "A pass key stands somewhere in the dull text below. Find it and remember it."
PASS_NEEDLE = "The pass key is {number}. Remember it: {number} is the pass key."
PASS_QUESTION = "What is the pass key?"
PASS_ANSWER = "The pass key is"
NOISE = "The road is long. The rain falls. The clouds go by. We walk there and we walk back again."

LETTERS = "BCDFGHJKLMNPQRSTVWXZ"  # without vowels, so that no name is a word
NAME_LETTERS = 4
TRACK_INTRO = (
    "Assignments to variables are hidden in the text below. Follow them and remember them."
)
TRACK_FIRST = "VAR {name} = {number}."
TRACK_NEXT = "VAR {name} = VAR {before}."
TRACK_QUESTION = "Which variables have the value {number}, directly or through other variables?"
TRACK_ANSWER = "The variables that have the value {number} are"
TOKENS_OF_NAME = 8  # maximum tokens of a name and a comma


def needle(
    tokenizer: "PreTrainedTokenizerBase",
    text: Text,
    *,
    length: int,
    samples: int,
    setting: Setting,
    seed: int = 0,
) -> tuple[Sample, ...]:
    """Create prompts with one seven-digit number each, at depths spread evenly from start to end.

    The same seed hides the same numbers at the same positions for both settings.

    Args:
        tokenizer: The model's; its chat template is used if it has one.
        text: Source of the haystack, cut at a random sentence.
        length: Tokens of prompt and question; a prompt is at most a word shorter.
        samples: Number of prompts.
        setting: Whether the question is in the compressed prompt or follows it.
        seed: Of the numbers and of the positions in the text.

    Raises:
        TaskError: the length is too small for the wording, or the text is too short.
    """
    haystack = Haystack.of(text)
    puzzles = []
    for i in range(samples):
        random_ = random.Random(f"needle {seed} {i}")
        answer, depth = number(random_), (i + 0.5) / samples
        hidden = ((depth, NEEDLE.format(number=answer)),)
        begin = haystack.choose(random.Random(f"text {seed} {i}"), length)
        puzzles.append(hiding(haystack, begin, hidden, INTRO, QUESTION, ANSWER, (answer,), depth))
    return posed("needle", tokenizer, puzzles, length=length, setting=setting)


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
    """Create prompts with several numbers, each under its own keyword, and a question about one.

    The numbers are in equal parts of the text, one per part; the questions rotate over them.

    Args:
        tokenizer: As for `needle`.
        text: As for `needle`.
        length: As for `needle`.
        samples: As for `needle`.
        setting: As for `needle`.
        seed: As for `needle`.
        keys: Number of numbers, 2 to 8.

    Raises:
        TaskError: as for `needle`, or `keys` is out of range.
    """
    if not 2 <= keys <= len(KEYS):
        raise TaskError(f"keys={keys}: multikey hides 2 to {len(KEYS)} numbers")
    haystack = Haystack.of(text)
    puzzles = []
    for i in range(samples):
        random_ = random.Random(f"multikey {seed} {i}")
        names = random_.sample(KEYS, keys)
        numbers = [number(random_) for _ in names]
        depths = spread(random_, keys)
        hidden = tuple(
            (depth, KEYED_NEEDLE.format(key=name, number=answer))
            for depth, name, answer in zip(depths, names, numbers, strict=True)
        )
        asked = i % keys
        question = KEYED_QUESTION.format(key=names[asked])
        opening = KEYED_ANSWER.format(key=names[asked])
        begin = haystack.choose(random.Random(f"text {seed} {i}"), length)
        answers, depth = (numbers[asked],), depths[asked]
        puzzles.append(
            hiding(haystack, begin, hidden, KEYED_INTRO, question, opening, answers, depth)
        )
    return posed("multikey", tokenizer, puzzles, length=length, setting=setting)


def passkey(
    tokenizer: "PreTrainedTokenizerBase",
    *,
    length: int,
    samples: int,
    setting: Setting,
    seed: int = 0,
) -> tuple[Sample, ...]:
    """Create prompts with one number, stated twice, in a text that repeats a few sentences.

    Args:
        tokenizer: As for `needle`.
        length: As for `needle`.
        samples: As for `needle`.
        setting: As for `needle`.
        seed: Of the numbers.

    Raises:
        TaskError: the length is too small for the wording.
    """
    haystack = dull(length)
    puzzles = []
    for i in range(samples):
        answer, depth = number(random.Random(f"passkey {seed} {i}")), (i + 0.5) / samples
        hidden = ((depth, PASS_NEEDLE.format(number=answer)),)
        asked = (PASS_INTRO, PASS_QUESTION, PASS_ANSWER)
        puzzles.append(hiding(haystack, 0, hidden, *asked, (answer,), depth))
    return posed("passkey", tokenizer, puzzles, length=length, setting=setting)


def variable_tracking(
    tokenizer: "PreTrainedTokenizerBase",
    text: Text,
    *,
    length: int,
    samples: int,
    setting: Setting,
    seed: int = 0,
    hops: int = 4,
) -> tuple[Sample, ...]:
    """Create prompts in which a number is passed on between variables; the question is for all.

    The assignments are in equal parts of the text, in order, and the score is the share of the
    `hops + 1` names in the answer.

    Args:
        tokenizer: As for `needle`.
        text: As for `needle`.
        length: As for `needle`.
        samples: As for `needle`.
        setting: As for `needle`.
        seed: As for `needle`.
        hops: How often the value is passed on, at least 1.

    Raises:
        TaskError: as for `needle`, or `hops` is out of range.
    """
    puzzles = tracked("variable-tracking", Haystack.of(text), length, samples, seed=seed, hops=hops)
    return posed("variable-tracking", tokenizer, puzzles, length=length, setting=setting)


def tracked(
    task: TaskName, haystack: Haystack, length: int, samples: int, *, seed: int, hops: int
) -> list[Puzzle]:
    """Create the puzzles of `variable_tracking`, whose arguments these are.

    Raises:
        TaskError: `hops` is out of range.
    """
    if hops < 1:
        raise TaskError(f"hops={hops}: {task} needs at least 1 hop")
    puzzles = []
    for i in range(samples):
        random_ = random.Random(f"{task} {seed} {i}")
        names, value = _names(random_, hops + 1), number(random_)
        first = TRACK_FIRST.format(name=names[0], number=value)
        rest = [TRACK_NEXT.format(name=name, before=before) for before, name in pairwise(names)]
        hidden = tuple(zip(spread(random_, hops + 1), (first, *rest), strict=True))
        question = TRACK_QUESTION.format(number=value)
        opening = TRACK_ANSWER.format(number=value)
        begin = haystack.choose(random.Random(f"text {seed} {i}"), length)
        asked = (TRACK_INTRO, question, opening)
        room = TOKENS_OF_NAME * len(names)
        puzzles.append(hiding(haystack, begin, hidden, *asked, names, 0.0, room))
    return puzzles


def dull(length: int) -> Haystack:
    """Return a text that repeats a few sentences, for prompts of up to `length` tokens."""
    return Haystack.of(Text("of dull sentences", (NOISE,) * max(length, 1)))


def hiding(
    haystack: Haystack,
    begin: int,
    hidden: Sequence[tuple[float, str]],
    intro: str,
    question: str,
    opening: str,
    answers: tuple[str, ...],
    depth: float,
    new_tokens: int = NEW_TOKENS,
) -> Puzzle:
    """Return the puzzle whose text is the haystack from word `begin` on, with `hidden` in it."""
    return Puzzle(
        intro=intro,
        body=partial(haystack.with_hidden, begin, hidden=hidden),
        available=len(haystack.words) - begin,
        source=haystack.name,
        question=question,
        opening=opening,
        answers=answers,
        depth=depth,
        new_tokens=new_tokens,
    )


def number(random_: random.Random) -> str:
    """Return distinct digits: small models lose their place in 1474787, with any cache."""
    return "".join(random_.sample("123456789", DIGITS))


def spread(random_: random.Random, count: int) -> list[float]:
    """Return depths in equal parts of a text, one per part and never at its edge."""
    return [(j + 0.1 + 0.8 * random_.random()) / count for j in range(count)]


def _names(random_: random.Random, count: int) -> tuple[str, ...]:
    """Return distinct names."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(random_.sample(LETTERS, NAME_LETTERS))] = None
    return tuple(found)
