"""The tokens of a prompt, each with the part of the text that it stands for."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SILENT: Final = "\N{MIDDLE DOT}"  # shown for a token without text and without a name


@dataclass(frozen=True, slots=True)
class Piece:
    """A token of a prompt.

    Attributes:
        id: its number in the model's vocabulary.
        text: what it stands for; empty where that is nothing, such as of a token that begins every
            prompt, and of the later bytes of a character that takes several tokens.
        shown: the text, or what is shown where there is none.
    """

    id: int
    text: str
    shown: str


def pieces(tokenizer: "PreTrainedTokenizerBase", text: str, *, special: bool) -> tuple[Piece, ...]:
    """Cut a text into a model's tokens.

    Their texts, joined, are the text again, where the tokenizer says which characters a token is
    of. One that does not (written in Python, without offsets) is asked what each token alone says.

    Args:
        tokenizer: the model's.
        text: the prompt.
        special: whether to add the tokens that the model wants around a text.
    """
    if tokenizer.is_fast:
        found = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        ids: list[int] = found["input_ids"]
        texts = cut(text, [end for _, end in found["offset_mapping"]])
    else:
        ids = tokenizer.encode(text, add_special_tokens=special)
        texts = tuple(str(tokenizer.decode([each])) for each in ids)
    names = {each: str(tokenizer.decode([each])) for each in tokenizer.all_special_ids}
    return tuple(
        Piece(each, part, part or names.get(each) or SILENT)
        for each, part in zip(ids, texts, strict=True)
    )


def cut(text: str, ends: Sequence[int]) -> tuple[str, ...]:
    """Cut a text where tokens end; the pieces, joined, are the text.

    What lies between two tokens goes to the later one, and what follows the last one to that. A
    token that ends where an earlier one does, as special tokens and later bytes do, gets nothing.

    >>> cut("a  b ", [1, 0, 4])
    ('a', '', '  b ')
    """
    reached = list(accumulate(ends, max))
    starts = [0, *reached]
    return tuple(
        text[start : None if i == len(reached) else end]
        for i, (start, end) in enumerate(zip(starts, reached, strict=False), 1)
    )
