"""A question about a long prompt whose answer is known, at a wanted number of tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_eval.tasks.prompt import PromptFrame, fit
from kv_eval.tasks.sample import Sample, Setting, TaskError, TaskName

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SLACK = 16  # tokens that the last prompt of a text may fall short of its length


@dataclass(frozen=True, slots=True)
class Puzzle:
    """What is asked about what, before it is known how much of that the length has room for.

    Attributes:
        intro: Said before the body.
        body: The text that a count of words makes; more words never take fewer tokens.
        available: The greatest count that `body` takes.
        source: What the words are from, for messages.
        question: Asked at the end.
        opening: How the model's answer begins.
        answers: What is to be found in the rest of it.
        depth: Where the answer stands, from 0 at the start of the body to 1 at its end.
        new_tokens: How many tokens the answer may have.
    """

    intro: str
    body: Callable[[int], str]
    available: int
    source: str
    question: str
    opening: str
    answers: tuple[str, ...]
    depth: float
    new_tokens: int


def posed(
    task: TaskName,
    tokenizer: "PreTrainedTokenizerBase",
    puzzles: Sequence[Puzzle],
    *,
    length: int,
    setting: Setting,
) -> tuple[Sample, ...]:
    """Make puzzles into samples whose prompt and question have `length` tokens, or a word less.

    Raises:
        TaskError: there are none, the length leaves no room for the wording, or a body is too
            short for it.
    """
    if not puzzles:
        raise TaskError(f"samples=0: {task} needs at least 1")
    frame = PromptFrame.of(tokenizer)
    return tuple(_sample(task, frame, puzzle, length, setting) for puzzle in puzzles)


def _sample(
    task: TaskName, frame: PromptFrame, puzzle: Puzzle, length: int, setting: Setting
) -> Sample:
    question = f"\n\n{puzzle.question}{frame.tail}{puzzle.opening}"

    def encode(count: int) -> tuple[list[int], list[int]]:
        return frame.encode(f"{frame.head}{puzzle.intro}\n\n{puzzle.body(count)}", question)

    def cost(count: int) -> int:
        return sum(map(len, encode(count)))

    count = fit(cost, length, puzzle.available)
    if count < 0:
        raise TaskError(
            f"length={length}: {task} needs {cost(0)} tokens for its wording alone with this"
            " tokenizer; ask for more"
        )
    prompt, rest = encode(count)
    total = len(prompt) + len(rest)
    if count == puzzle.available and total < length - SLACK:
        raise TaskError(
            f"the text {puzzle.source} gives a prompt of {total} tokens, fewer than"
            f" length={length}; give a longer text"
        )
    if setting == "aware":
        prompt, rest = [*prompt, *rest[:-1]], rest[-1:]
    return Sample(
        task=task,
        setting=setting,
        prompt_ids=tuple(prompt),
        question_ids=tuple(rest),
        answers=puzzle.answers,
        depth=puzzle.depth,
        new_tokens=puzzle.new_tokens,
    )
