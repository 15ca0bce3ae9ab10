"""RULER's coded words: which three of a text are the most frequent, in a Zipf distribution."""

import math
import random
import string
from functools import partial
from typing import Final

from kv_eval.tasks.puzzle import Puzzle

NEW_TOKENS: Final = 50
ASKED: Final = 3
EXPONENT: Final = 2.0
ZETA: Final = math.pi**2 / 6  # of the exponent
LETTERS: Final = 6
LEAST: Final = 80  # words; with fewer, two of the queried ranks may be equally frequent
NOISE: Final = "..."  # the most frequent of all, which is no word
INTRO: Final = (
    "Below is a text of coded words. Some stand in it far more often than the others. The dots"
    " between them are noise."
)
QUESTION: Final = "Which 3 coded words stand most often in the text?"
OPENING: Final = "The 3 coded words that stand most often in the text are:"


def fwe(length: int, samples: int, seed: int) -> list[Puzzle]:
    """Create the puzzles of frequent words extraction.

    The word of rank k, of which the first is noise, occurs in proportion to k to the power of -2.

    Args:
        length: Tokens of a prompt with its question.
        samples: Number of puzzles.
        seed: Of the words and of their order.
    """
    puzzles = []
    for i in range(samples):
        random_ = random.Random(f"fwe {seed} {i}")
        words = _coded(random_, 1 + math.isqrt(length))
        puzzles.append(
            Puzzle(
                intro=INTRO,
                body=partial(_text, words, random_.random()),
                available=length,
                source="of coded words",
                question=QUESTION,
                opening=OPENING,
                answers=words[:ASKED],
                depth=0.5,
                new_tokens=NEW_TOKENS,
            )
        )
    return puzzles


def _text(words: tuple[str, ...], order: float, more: int) -> str:
    """Return a text of about `LEAST + more` words in a random order."""
    count = LEAST + more
    found = [
        each
        for rank, word in enumerate((NOISE, *words), 1)
        for each in [word] * int(count / (ZETA * rank**EXPONENT))
    ]
    random.Random(order).shuffle(found)
    return " ".join(found)


def _coded(random_: random.Random, count: int) -> tuple[str, ...]:
    """Return distinct words of random letters."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(random_.choices(string.ascii_lowercase, k=LETTERS))] = None
    return tuple(found)
