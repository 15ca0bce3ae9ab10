"""How an answer, a continuation or a text is scored: pure functions."""

import re
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

_SEPARATOR = re.compile(r"(?<=\d)[,_\u00a0 ](?=\d{3}(?!\d))")


def found(generated: str, answer: str) -> bool:
    """Whether the whole number or word stands in the generated text.

    Thousands separators of a number are ignored, and whether letters of a word are capital ones.
    """
    edge = r"\d" if answer.isdigit() else r"\w"
    plain = re.compile(rf"(?<!{edge}){re.escape(answer)}(?!{edge})", re.IGNORECASE)
    return any(plain.search(text) for text in (generated, _SEPARATOR.sub("", generated)))


def found_share(generated: str, answers: Sequence[str]) -> float:
    """The share of the answers that stand in the generated text, from 0 to 1.

    Raises:
        ValueError: there is no answer.
    """
    if not answers:
        raise ValueError("a share of answers needs at least one of them")
    return sum(found(generated, answer) for answer in answers) / len(answers)


def nats_per_token(logits: Float[Tensor, "L V"], targets: Int[Tensor, " L"]) -> float:
    """The mean negative log-likelihood of the targets, in nats, computed in float64.

    Args:
        logits: Of each target's predecessor, any float dtype.
        targets: Token ids.
    """
    return float(torch.nn.functional.cross_entropy(logits.double(), targets.long()))


def agreement_share(tokens: Sequence[int], reference: Sequence[int]) -> float:
    """The share of the reference's tokens that stand at the same place in `tokens`, from 0 to 1.

    Raises:
        ValueError: the reference is empty.
    """
    if not reference:
        raise ValueError("agreement needs at least one reference token")
    equal = sum(a == b for a, b in zip(tokens, reference, strict=False))
    return equal / len(reference)
