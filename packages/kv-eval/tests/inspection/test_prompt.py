"""The text of a token: whatever the tokenizer, no character is lost and none is there twice."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kv_eval.inspection.prompt import SILENT, Piece, cut, pieces
from tiny_model import tokenizer


def bytewise() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are bytes, with one before every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({name: i for i, name in enumerate(["<s>", *alphabet])}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")


@given(st.text(max_size=30), st.lists(st.integers(0, 30), min_size=1, max_size=12))
def test_pieces_joined_are_the_text(text: str, ends: list[int]) -> None:
    found = cut(text, [min(end, len(text)) for end in ends])
    assert len(found) == len(ends)
    assert "".join(found) == text


def test_what_no_token_covers_goes_to_a_neighbour() -> None:
    assert cut("a  b ", [1, 0, 4]) == ("a", "", "  b ")
    assert cut("", [0, 0]) == ("", "")
    assert cut("", []) == ()


@pytest.mark.parametrize("text", ["Hello  there", "a\n\nb ", "naïve \N{GRINNING FACE}!", " x"])
@pytest.mark.parametrize("make", [tokenizer, bytewise])
def test_a_prompt_is_the_text_of_its_tokens(
    make: Callable[[], PreTrainedTokenizerFast], text: str
) -> None:
    made = make()
    for special in (True, False):
        found = pieces(made, text, special=special)
        assert "".join(piece.text for piece in found) == text
        assert [piece.id for piece in found] == made.encode(text, add_special_tokens=special)


def test_a_token_without_text_is_shown_by_its_name_or_a_dot() -> None:
    made = bytewise()
    first, *rest = pieces(made, "aé", special=True)
    assert first == Piece(0, "", "<s>")
    assert [(piece.text, piece.shown) for piece in rest] == [("a", "a"), ("é", "é"), ("", SILENT)]


def test_special_tokens_in_the_text_are_text() -> None:
    found = pieces(tokenizer(), "<user>hi<end>", special=False)
    assert [piece.text for piece in found] == ["<user>", "h", "i", "<end>"]


def test_a_tokenizer_without_offsets_is_asked_for_each_token() -> None:
    slow = SimpleNamespace(
        is_fast=False,
        all_special_ids=[9],
        encode=lambda text, add_special_tokens: [9, *map(int, text)],
        decode=lambda ids: {1: "one", 2: "two", 9: "<s>"}[ids[0]],
    )
    found = pieces(slow, "21", special=True)
    assert [(piece.id, piece.shown) for piece in found] == [(9, "<s>"), (2, "two"), (1, "one")]
