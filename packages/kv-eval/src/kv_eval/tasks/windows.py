"""Windows of plain text: nats per token of the true continuation, and agreement of greedy ones."""

import random
from typing import TYPE_CHECKING

from kv_eval.tasks.sample import Sample, TaskError, TaskName
from kv_eval.tasks.text import Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def nll(
    tokenizer: "PreTrainedTokenizerBase",
    text: Text,
    *,
    length: int,
    samples: int,
    seed: int = 0,
    continuation: int = 256,
) -> tuple[Sample, ...]:
    """Create windows of text: `length` prompt tokens, then the true continuation to force.

    The prompt's last token is fed after compression, so that all of the continuation is predicted
    from the compressed cache. Windows are spread evenly over the text and overlap only if it is too
    short for all of them.

    Args:
        tokenizer: The model's.
        text: Source of the windows.
        length: Tokens of the prompt, at least 2.
        samples: Number of windows.
        seed: Shifts the windows.
        continuation: Scored tokens, at least 1.

    Raises:
        TaskError: the text is shorter than one window, or a number is out of range.
    """
    if continuation < 1:
        raise TaskError(f"continuation={continuation}: nll scores at least 1 token")
    windows = _windows("nll", tokenizer, text, length, continuation, samples, seed)
    return tuple(
        Sample(
            task="nll",
            setting="agnostic",
            prompt_ids=window[: length - 1],
            question_ids=window[length - 1 : length],
            target_ids=window[length:],
        )
        for window in windows
    )


def agreement(
    tokenizer: "PreTrainedTokenizerBase",
    text: Text,
    *,
    length: int,
    samples: int,
    seed: int = 0,
    new_tokens: int = 64,
) -> tuple[Sample, ...]:
    """Create windows of text to continue greedily for `new_tokens` tokens, past any end of text.

    Args:
        tokenizer: The model's.
        text: Source of the windows.
        length: Tokens of the prompt, at least 2.
        samples: Number of windows.
        seed: Shifts the windows.
        new_tokens: Tokens to generate and compare, at least 1.

    Raises:
        TaskError: the text is shorter than one window, or a number is out of range.
    """
    if new_tokens < 1:
        raise TaskError(f"new_tokens={new_tokens}: agreement compares at least 1 token")
    windows = _windows("agreement", tokenizer, text, length, 0, samples, seed)
    return tuple(
        Sample(
            task="agreement",
            setting="agnostic",
            prompt_ids=window[:-1],
            question_ids=window[-1:],
            new_tokens=new_tokens,
            stop=False,
        )
        for window in windows
    )


def _windows(
    task: TaskName,
    tokenizer: "PreTrainedTokenizerBase",
    text: Text,
    length: int,
    after: int,
    samples: int,
    seed: int,
) -> list[tuple[int, ...]]:
    if length < 2:
        raise TaskError(f"length={length}: {task} needs a prompt of at least 2 tokens")
    if samples < 1:
        raise TaskError(f"samples={samples}: {task} needs at least 1")
    lead = text_start(tokenizer)
    ids = tokenizer.encode(text.body, add_special_tokens=False, verbose=False)
    size = length + after - len(lead)
    room = len(ids) - size
    if room < 0:
        raise TaskError(
            f"the text {text.name} has {len(ids)} tokens, fewer than the {size} of one window of"
            f" {task} at length={length}; use a longer text or a smaller length"
        )
    stride = room / samples
    shift = random.Random(f"{task} {seed}").random() * stride
    begins = [int(shift + i * stride) for i in range(samples)]
    return [tuple(lead + ids[begin : begin + size]) for begin in begins]


def text_start(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the beginning-of-text token, if the tokenizer prepends one to every text."""
    bos = tokenizer.bos_token_id
    first = tokenizer.encode("a")[:1]
    return first if bos is not None and first == [bos] else []
