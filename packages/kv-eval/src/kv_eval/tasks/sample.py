"""Samples of a task: token ids to compress, token ids to feed afterwards, expected answers."""

from dataclasses import dataclass, field
from typing import Literal

Setting = Literal["aware", "agnostic"]
RulerName = Literal[
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
    "qa_1",
    "qa_2",
]
TaskName = Literal[
    "needle",
    "multikey",
    "passkey",
    "variable-tracking",
    "common-words",
    "nll",
    "agreement",
    RulerName,
]
Match = Literal["words", "all", "part"]


class TaskError(ValueError):
    """A task cannot be created from its arguments; the message has the valid range."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt and its question.

    An evaluator feeds `prompt_ids`, which the cache compresses, then `question_ids`, which is never
    empty, so that every scored token is computed from the compressed cache. It then teacher-forces
    `target_ids` if there are any, and otherwise generates `new_tokens` tokens greedily.

    Attributes:
        task: The task that created it.
        setting: `aware` if the question is part of `prompt_ids`, `agnostic` if it follows.
        prompt_ids: Token ids whose keys and values are compressed.
        question_ids: Token ids fed afterwards; the last one predicts the answer's first token.
        target_ids: The true continuation, for `nll`; empty otherwise.
        answers: Numbers or words expected in the generated text. Empty for tasks without such
            answers.
        match: How they are scored: the share found as whole `words` (`found_share`), or by RULER's
            string match, of `all` or of one of them in `part` (`match_all`, `match_part`).
        depth: Position of the answer, from 0 at the start of the text to 1 at its end.
        new_tokens: Maximum number of generated tokens; 0 for `nll`.
        stop: Whether generation ends at the model's end-of-text token.
    """

    task: TaskName
    setting: Setting
    prompt_ids: tuple[int, ...] = field(repr=False)
    question_ids: tuple[int, ...] = field(repr=False)
    target_ids: tuple[int, ...] = field(default=(), repr=False)
    answers: tuple[str, ...] = ()
    match: Match = "words"
    depth: float = 0.0
    new_tokens: int = 0
    stop: bool = True

    def __post_init__(self) -> None:
        """Check that there are tokens to compress and to predict from."""
        if not self.prompt_ids or not self.question_ids:
            raise TaskError(
                "a sample needs at least one token to compress and one to feed after it"
            )

    @property
    def length(self) -> int:
        """Tokens of prompt and question together."""
        return len(self.prompt_ids) + len(self.question_ids)
