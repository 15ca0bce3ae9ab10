"""Questions with known answers about long prompts of a given number of tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_eval.tasks.prompt import PromptFrame, fit
from kv_eval.tasks.sample import Match, Sample, Setting, TaskError, TaskName

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SLACK = 16  # tokens by which the last prompt of a text may be shorter


@dataclass(frozen=True, slots=True)
class Puzzle:
    """A question about a body of text whose size is chosen later to fit the length.

    Attributes:
        intro: Text before the body.
        body: Returns the text with a given number of words; more words never take fewer tokens.
        available: The maximum number of words of `body`.
        source: Name of the source of the words, for messages.
        question: Text at the end.
        opening: Start of the model's answer.
        answers: Expected in the rest of the answer.
        depth: Position of the answer, from 0 at the start of the body to 1 at its end.
        new_tokens: Maximum tokens of the answer.
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
    """Turn puzzles into samples whose prompt and question have `length` tokens, or a word less.

    Raises:
        TaskError: there are no puzzles, the length is too small for the wording, or a body is too
            short.
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

    count = fitting(task, cost, length, puzzle)
    prompt, rest = encode(count)
    total = len(prompt) + len(rest)
    if count == puzzle.available and total < length - SLACK:
        raise TaskError(
            f"the text {puzzle.source} is enough for a prompt of {total} tokens, fewer than"
            f" length={length}; use a longer text"
        )
    return sample_of(task, puzzle, prompt, rest, setting)


def fitting(task: TaskName, cost: Callable[[int], int], length: int, puzzle: Puzzle) -> int:
    """Return how many words of a body fit, where `cost` gives the tokens of so many.

    Raises:
        TaskError: the length is too small for the wording.
    """
    count = fit(cost, length, puzzle.available)
    if count < 0:
        raise TaskError(
            f"length={length}: {task} needs {cost(0)} tokens for its wording alone with this"
            " tokenizer; use a greater length"
        )
    return count


def sample_of(
    task: TaskName,
    puzzle: Puzzle,
    prompt: Sequence[int],
    question: Sequence[int],
    setting: Setting,
    match: Match = "words",
) -> Sample:
    """Return the sample of a puzzle; all but the last of a question inside is of the prompt."""
    if setting == "aware":
        prompt, question = [*prompt, *question[:-1]], question[-1:]
    return Sample(
        task=task,
        setting=setting,
        prompt_ids=tuple(prompt),
        question_ids=tuple(question),
        answers=puzzle.answers,
        match=match,
        depth=puzzle.depth,
        new_tokens=puzzle.new_tokens,
    )
