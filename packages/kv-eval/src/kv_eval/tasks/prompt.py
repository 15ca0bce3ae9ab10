"""Prompts of a given number of tokens, with sentences hidden in a haystack of text."""

import bisect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_eval.tasks.sample import TaskError
from kv_eval.tasks.text import Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "THE-MESSAGE-STANDS-HERE"


@dataclass(frozen=True, slots=True)
class PromptFrame:
    """The text around the user's message, and the encoding of a text that starts with it.

    It is that of the chat template; without one an empty line separates message and
    answer.
    """

    tokenizer: "PreTrainedTokenizerBase"
    head: str
    tail: str
    chat: bool

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase") -> "PromptFrame":
        """Return the frame of one user message, up to the start of the assistant's answer.

        Raises:
            TaskError: the chat template does not contain the user's message verbatim.
        """
        if not tokenizer.chat_template:
            return cls(tokenizer, "", "\n\n", chat=False)
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,  # ignored by templates without thinking
        )
        head, mark, tail = str(rendered).partition(_MARK)
        if not mark or not tail:
            raise TaskError("the tokenizer's chat template omits the user's message")
        return cls(tokenizer, head, tail, chat=True)

    def encode(self, start: str, rest: str = "") -> tuple[list[int], list[int]]:
        """Encode a text from its first token on, and the rest separately."""
        tokenizer = self.tokenizer
        first = tokenizer.encode(start, add_special_tokens=not self.chat)
        return first, tokenizer.encode(rest, add_special_tokens=False) if rest else []


@dataclass(frozen=True, slots=True)
class Haystack:
    """Words, and the positions where sentences begin."""

    name: str
    words: tuple[str, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, text: Text) -> "Haystack":
        """Return the words of a text and the starts of its sentences."""
        words: list[str] = []
        starts: list[int] = []
        for piece in text.pieces():
            starts.append(len(words))
            words += piece
        return cls(text.name, tuple(words), tuple(starts))

    def choose(self, random_: random.Random, room: int) -> int:
        """Return the start of a sentence followed by `room` words, or the first if none is."""
        last = bisect.bisect_right(self.starts, len(self.words) - room)
        return self.starts[random_.randrange(max(last, 1))]

    def with_hidden(self, begin: int, count: int, hidden: Sequence[tuple[float, str]]) -> str:
        """Join `count` words from `begin`, with each sentence at the start nearest its depth."""
        places = [self._near(begin, begin + count, depth) for depth, _ in hidden]
        parts: list[str] = []
        at = begin
        for place, (_, sentence) in sorted(zip(places, hidden, strict=True)):
            parts += self.words[at:place]
            parts.append(sentence)
            at = place
        parts += self.words[at : begin + count]
        return " ".join(parts)

    def _near(self, begin: int, end: int, depth: float) -> int:
        wanted = begin + depth * (end - begin)
        low = bisect.bisect_left(self.starts, begin)
        inside = self.starts[low : bisect.bisect_right(self.starts, end)]
        return min(inside, key=lambda start: abs(start - wanted), default=begin)


def fit(cost: Callable[[int], int], room: int, available: int) -> int:
    """Return the largest count of words, at most `available`, whose prompt fits in `room` tokens.

    `cost` must not fall as the count grows; -1 means that the frame alone does not fit.
    """
    if cost(0) > room:
        return -1
    low, high = 0, min(available, room)  # a word is at least a token
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost(middle) <= room else (low, middle - 1)
    return low
