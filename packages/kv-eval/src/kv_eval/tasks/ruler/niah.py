"""RULER's needles: numbers or UUIDs under keys, hidden in dull sentences, a text, or their like."""

import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

from kv_eval.tasks.counting import plain_words
from kv_eval.tasks.hidden import dull, hiding, number, spread
from kv_eval.tasks.prompt import Haystack
from kv_eval.tasks.puzzle import Puzzle
from kv_eval.tasks.sample import RulerName, TaskError
from kv_eval.tasks.text import Text

NEW_TOKENS: Final = 128
TOKENS_OF_LINE: Final = 12  # minimum tokens of a needle
INTRO: Final = "Special magic {noun}s are hidden in the text below. Find them and remember them."
NEEDLE: Final = "The special magic {noun} for {key} is {value}."
ONE_OF: Final = "One of the special magic {noun}s for {key} is {value}."
QUESTION: Final = "What is the special magic {noun} for {key}?"
OPENING: Final = "The special magic {noun} for {key} is"
QUESTIONS: Final = "What are all the special magic {noun}s for {key}?"
OPENINGS: Final = "The special magic {noun}s for {key} are"

Draw = Callable[[random.Random], str]


@dataclass(frozen=True, slots=True)
class Needles:
    """A task of needles.

    Attributes:
        hay: What they are hidden in: repeated dull sentences, a text, or other needles.
        keys: Number of keys beside which values are hidden.
        values: Number of values under each key.
        asked: Number of keys in the question.
        ids: Whether keys, and whether values are UUIDs instead of words and numbers.
    """

    hay: Literal["dull", "text", "needles"]
    keys: int = 1
    values: int = 1
    asked: int = 1
    ids: tuple[bool, bool] = (False, False)

    @property
    def noun(self) -> str:
        """What a value is called."""
        return "uuid" if self.ids[1] else "number"

    def sentence(self, key: str, value: str) -> str:
        """Return a needle."""
        words = NEEDLE if self.values == 1 else ONE_OF
        return words.format(noun=self.noun, key=key, value=value)

    def question(self, keys: Sequence[str]) -> tuple[str, str]:
        """Return the question for the values of keys, and the start of its answer."""
        several = len(keys) * self.values > 1
        *most, last = keys
        key = f"{', '.join(most)} and {last}" if most else last
        found = (QUESTIONS, OPENINGS) if several else (QUESTION, OPENING)
        question, opening = (words.format(noun=self.noun, key=key) for words in found)
        return question, opening


TASKS: Final[dict[RulerName, Needles]] = {
    "niah_single_1": Needles("dull"),
    "niah_single_2": Needles("text"),
    "niah_single_3": Needles("text", ids=(False, True)),
    "niah_multikey_1": Needles("text", keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", ids=(True, True)),
    "niah_multivalue": Needles("text", values=4),
    "niah_multiquery": Needles("text", keys=4, asked=4),
}


def niah(task: RulerName, text: Text, length: int, samples: int, seed: int) -> list[Puzzle]:
    """Create the puzzles of a task of needles.

    A single needle is at depths spread evenly over the samples; several are in equal parts of the
    text, and the question about one of them rotates.

    Args:
        task: One of `TASKS`.
        text: Source of the haystack and of the words in keys.
        length: Tokens of a prompt with its question.
        samples: Number of puzzles.
        seed: Of keys, values and positions.

    Raises:
        TaskError: the text has too few words for keys.
    """
    kind = TASKS[task]
    others = length // TOKENS_OF_LINE if kind.hay == "needles" else 0
    haystack = dull(length) if kind.hay == "dull" else Haystack.of(text)
    key_of = _uuid if kind.ids[0] else _keys(task, text, kind.keys + others)
    value_of = _uuid if kind.ids[1] else number
    puzzles = []
    for i in range(samples):
        random_ = random.Random(f"{task} {seed} {i}")
        keys = _distinct(random_, key_of, kind.keys + others)
        owners = [key for key in keys for _ in range(kind.values)]
        hidden = _distinct(random_, value_of, len(owners))
        lines = [kind.sentence(*each) for each in zip(owners, hidden, strict=True)]
        count = kind.keys * kind.values
        depths = [(i + 0.5) / samples] if count == 1 else spread(random_, count)
        rotated = keys[i % kind.keys : i % kind.keys + 1]
        asked = rotated if kind.asked == 1 else random_.sample(keys, kind.asked)
        right = [place for place in range(count) if owners[place] in asked]
        puzzle = hiding(
            haystack,
            haystack.choose(random.Random(f"text {seed} {i}"), length),
            tuple(zip(depths, lines[:count], strict=True)),
            INTRO.format(noun=kind.noun),
            *kind.question(asked),
            tuple(hidden[place] for place in right),
            depths[right[0]],
            NEW_TOKENS,
        )
        if others:
            body = partial(_among, lines[0], lines[1:], depths[0])
            puzzle = replace(puzzle, body=body, available=others, source="of needles")
        puzzles.append(puzzle)
    return puzzles


def _among(line: str, others: Sequence[str], depth: float, count: int) -> str:
    """Join `count` lines, with one at a depth between them."""
    place = round(depth * count)
    return "\n".join([*others[:place], line, *others[place:count]])


def _keys(task: RulerName, text: Text, count: int) -> Draw:
    """Return what draws pairs of a text's words.

    Raises:
        TaskError: the words make fewer than twice `count` pairs.
    """
    words = plain_words(text)
    if len(words) * (len(words) - 1) < 2 * count:
        raise TaskError(
            f"the text {text.name} has {len(words)} plain words of 4 to 9 letters, too few for"
            f" {count} pairs of {task}; use a longer text"
        )
    return lambda random_: "-".join(random_.sample(words, 2))


def _uuid(random_: random.Random) -> str:
    return str(uuid.UUID(int=random_.getrandbits(128), version=4))


def _distinct(random_: random.Random, draw: Draw, count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw(random_)] = None
    return list(found)
