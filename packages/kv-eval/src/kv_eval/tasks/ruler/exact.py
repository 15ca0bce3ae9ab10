"""Prompts of an exact number of tokens, so that the samples of a task run together."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kv_eval.tasks.hidden import NOISE
from kv_eval.tasks.prompt import PromptFrame
from kv_eval.tasks.puzzle import SLACK, Puzzle, fitting, sample_of
from kv_eval.tasks.sample import Match, RulerName, Sample, Setting, TaskError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def exact(
    task: RulerName,
    tokenizer: "PreTrainedTokenizerBase",
    puzzles: Sequence[Puzzle],
    *,
    length: int,
    setting: Setting,
    match: Match,
) -> tuple[Sample, ...]:
    """Turn puzzles into samples whose prompt and question have exactly `length` tokens.

    What a body leaves of the length is filled with dull sentences before it. Line breaks before a
    shorter question make it as long as the longest one, so that all prompts are equally long, too.

    Raises:
        TaskError: there are no puzzles, the length is too small for the wording, or a body is too
            short.
    """
    if not puzzles:
        raise TaskError(f"samples=0: {task} needs at least 1")
    frame = PromptFrame.of(tokenizer)
    questions = [
        tokenizer.encode(
            f"\n\n{puzzle.question}{frame.tail}{puzzle.opening}", add_special_tokens=False
        )
        for puzzle in puzzles
    ]
    longest = max(map(len, questions))
    line_break = tokenizer.encode("\n", add_special_tokens=False)[-1]
    samples = []
    for puzzle, question in zip(puzzles, questions, strict=True):
        prompt = _filled(task, frame, puzzle, length, longest)
        rest = [line_break] * (longest - len(question)) + question
        samples.append(sample_of(task, puzzle, prompt, rest, setting, match))
    return tuple(samples)


def _filled(
    task: RulerName, frame: PromptFrame, puzzle: Puzzle, length: int, question: int
) -> list[int]:
    """Return the tokens of a prompt that leaves `question` of `length` tokens."""

    def encode(count: int) -> tuple[list[int], list[int]]:
        return frame.encode(f"{frame.head}{puzzle.intro}\n\n", f"\n{puzzle.body(count)}")

    def cost(count: int) -> int:
        return sum(map(len, encode(count))) + question

    count = fitting(task, cost, length, puzzle)
    start, body = encode(count)
    left = length - question - len(start) - len(body)
    if count == puzzle.available and left >= SLACK:
        raise TaskError(
            f"the text {puzzle.source} is enough for a prompt of {length - left} tokens of {task},"
            f" fewer than length={length}; use a longer text"
        )
    return [*start, *_dull_tokens(frame, left), *body]


def _dull_tokens(frame: PromptFrame, count: int) -> list[int]:
    words = len(NOISE.split())  # a word is at least a token
    repeated = " ".join([NOISE] * math.ceil(count / words))
    return frame.tokenizer.encode(repeated, add_special_tokens=False)[:count] if count else []
