"""What a task hands to an evaluator: token ids to compress, ids to feed after, what is right."""

from dataclasses import dataclass, field
from typing import Literal

Setting = Literal["aware", "agnostic"]
TaskName = Literal[
    "needle",
    "multikey",
    "passkey",
    "variable-tracking",
    "common-words",
    "nll",
    "agreement",
]


class TaskError(ValueError):
    """A task that cannot be made from what was given; the message says what would be right."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt and what is asked of the model after it.

    An evaluator feeds `prompt_ids` and lets the cache compress them, feeds `question_ids`, which is
    never empty, so that every token it then scores was computed from the compressed cache, and goes
    on by the task: it teacher-forces `target_ids` when there are any, and otherwise generates
    `new_tokens` tokens greedily.

    Attributes:
        task: Which task made it.
        setting: `aware` when the question is part of `prompt_ids`, `agnostic` when it comes after.
        prompt_ids: Token ids whose keys and values are compressed.
        question_ids: Token ids fed after that; the last one predicts the first token of the answer.
        target_ids: The true continuation, for `nll`; empty otherwise.
        answers: The numbers or words to be found in the generated text; the score is the share of
            them that are. Empty where there is no such answer.
        depth: Where the answer stands, from 0 at the start of the text to 1 at its end.
        new_tokens: How many tokens to generate at most; 0 for `nll`.
        stop: Whether generation ends at the model's end-of-text token.
    """

    task: TaskName
    setting: Setting
    prompt_ids: tuple[int, ...] = field(repr=False)
    question_ids: tuple[int, ...] = field(repr=False)
    target_ids: tuple[int, ...] = field(default=(), repr=False)
    answers: tuple[str, ...] = ()
    depth: float = 0.0
    new_tokens: int = 0
    stop: bool = True

    def __post_init__(self) -> None:
        """Refuse a sample that leaves nothing to compress or nothing to predict from."""
        if not self.prompt_ids or not self.question_ids:
            raise TaskError(
                "a sample needs at least one token to compress and one to feed after it"
            )

    @property
    def length(self) -> int:
        """Tokens of prompt and question together."""
        return len(self.prompt_ids) + len(self.question_ids)
