"""Scoring of answers and continuations: pure functions."""

import re
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

_SEPARATOR = re.compile(r"(?<=\d)[,_\u00a0 ](?=\d{3}(?!\d))")


def found(generated: str, answer: str) -> bool:
    """Return whether the generated text contains the whole number or word.

    Thousands separators of a number and the letter case of a word are ignored.
    """
    edge = r"\d" if answer.isdigit() else r"\w"
    plain = re.compile(rf"(?<!{edge}){re.escape(answer)}(?!{edge})", re.IGNORECASE)
    return any(plain.search(text) for text in (generated, _SEPARATOR.sub("", generated)))


def found_share(generated: str, answers: Sequence[str]) -> float:
    """Return the share of the answers found in the generated text, from 0 to 1.

    Raises:
        ValueError: no answers.
    """
    if not answers:
        raise ValueError("a share of answers needs at least one answer")
    return sum(found(generated, answer) for answer in answers) / len(answers)


def match_all(generated: str, answers: Sequence[str]) -> float:
    """Return the share of the answers that the generated text contains, letter case ignored.

    This is `string_match_all` of RULER (arXiv:2404.06654): an answer inside a longer word counts.

    Raises:
        ValueError: no answers.
    """
    return _contained(generated, answers) / len(answers)


def match_part(generated: str, answers: Sequence[str]) -> float:
    """Return 1 if the generated text contains an answer, letter case ignored, otherwise 0.

    This is `string_match_part` of RULER (arXiv:2404.06654).

    Raises:
        ValueError: no answers.
    """
    return float(_contained(generated, answers) > 0)


def _contained(generated: str, answers: Sequence[str]) -> int:
    if not answers:
        raise ValueError("a string match needs at least one answer")
    text = generated.lower()
    return sum(answer.lower() in text for answer in answers)


def nats_per_token(logits: Float[Tensor, "L V"], targets: Int[Tensor, " L"]) -> float:
    """Return the mean negative log-likelihood of the targets, in nats, computed in float64.

    Args:
        logits: At each target's predecessor, in any float dtype.
        targets: Token ids.
    """
    return float(torch.nn.functional.cross_entropy(logits.double(), targets.long()))


def agreement_share(tokens: Sequence[int], reference: Sequence[int]) -> float:
    """Return the share of the reference's tokens that `tokens` has at the same index.

    Raises:
        ValueError: the reference is empty.
    """
    if not reference:
        raise ValueError("agreement needs at least one reference token")
    equal = sum(a == b for a, b in zip(tokens, reference, strict=False))
    return equal / len(reference)
