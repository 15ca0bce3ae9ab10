"""The tokens of a prompt, each with its part of the text."""

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
        id: its id in the model's vocabulary.
        text: its part of the prompt; empty for tokens without text, such as a token that starts
            every prompt, or later bytes of a character that takes several tokens.
        shown: the text, or a placeholder.
    """

    id: int
    text: str
    shown: str


def pieces(tokenizer: "PreTrainedTokenizerBase", text: str, *, special: bool) -> tuple[Piece, ...]:
    """Tokenize a text.

    The texts of the tokens, joined, are the whole text if the tokenizer returns offsets. For one
    that does not (a slow tokenizer) each token is decoded separately.

    Args:
        tokenizer: the model's.
        text: the prompt.
        special: whether to add the model's special tokens around the text.
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
    """Split a text where tokens end; the pieces, joined, are the text.

    Text between two tokens belongs to the later one, and text after the last token to the last. A
    token that ends where an earlier one does, such as special tokens and later bytes, is empty.

    >>> cut("a  b ", [1, 0, 4])
    ('a', '', '  b ')
    """
    reached = list(accumulate(ends, max))
    starts = [0, *reached]
    return tuple(
        text[start : None if i == len(reached) else end]
        for i, (start, end) in enumerate(zip(starts, reached, strict=False), 1)
    )
