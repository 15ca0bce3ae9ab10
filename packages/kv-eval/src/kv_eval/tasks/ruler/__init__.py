"""The thirteen tasks of RULER (Hsieh et al., 2024, arXiv:2404.06654), from a generator of our own.

Kinds, counts, answer lengths and scoring are RULER's; wording, words and haystacks are ours, and
`qa_1` and `qa_2` ask about generated facts.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Final, get_args

from kv_eval.tasks.counting import INTRO, OPENING, QUESTION, RARE, counted, plain_words
from kv_eval.tasks.hidden import NOISE, dull, tracked
from kv_eval.tasks.puzzle import Puzzle
from kv_eval.tasks.ruler.exact import exact
from kv_eval.tasks.ruler.facts import questions
from kv_eval.tasks.ruler.niah import niah
from kv_eval.tasks.ruler.tallies import fwe
from kv_eval.tasks.sample import Match, RulerName, Sample, Setting
from kv_eval.tasks.text import Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RULER: Final[tuple[RulerName, ...]] = get_args(RulerName)
HOPS: Final = 4  # of `vt`
COMMON: Final = 10  # words that `cwe` asks for
OFTEN: Final = 30  # their occurrences in prompts of LENGTH tokens or more
LENGTH: Final = 4096
TRACKED_TOKENS: Final = 30  # of an answer
COUNTED_TOKENS: Final = 120


def ruler_samples(
    task: RulerName,
    tokenizer: "PreTrainedTokenizerBase",
    text: Text,
    *,
    length: int = LENGTH,
    samples: int,
    setting: Setting,
    seed: int = 0,
) -> tuple[Sample, ...]:
    """Create prompts of a task of RULER, all of exactly `length` tokens with their question.

    Args:
        task: One of `RULER`.
        tokenizer: The model's; its chat template is used if it has one.
        text: Source of haystacks, and of the words in keys and in `cwe`.
        length: Tokens of prompt and question.
        samples: Number of prompts.
        setting: Whether the question is in the compressed prompt or follows it, as in kvpress.
        seed: Of everything that is drawn.

    Raises:
        TaskError: the length is too small for the task, or the text has too few words.
    """
    puzzles = _puzzles(task, text, length, samples, seed)
    match: Match = "part" if task in ("qa_1", "qa_2") else "all"
    return exact(task, tokenizer, puzzles, length=length, setting=setting, match=match)


def _puzzles(task: RulerName, text: Text, length: int, samples: int, seed: int) -> list[Puzzle]:
    match task:
        case "vt":
            found = tracked(task, dull(length), length, samples, seed=seed, hops=HOPS)
            return [replace(puzzle, new_tokens=TRACKED_TOKENS) for puzzle in found]
        case "cwe":
            often = max(2 * RARE, min(OFTEN, OFTEN * length // LENGTH))
            others = " ".join((NOISE, INTRO, QUESTION, OPENING))  # what else a prompt says
            words = [word for word in plain_words(text) if word not in others]
            found = counted(task, text.name, words, samples, seed=seed, common=COMMON, often=often)
            return [replace(puzzle, new_tokens=COUNTED_TOKENS) for puzzle in found]
        case "fwe":
            return fwe(length, samples, seed)
        case "qa_1" | "qa_2":
            return questions(1 if task == "qa_1" else 2, length, samples, seed)
        case _:
            return niah(task, text, length, samples, seed)
