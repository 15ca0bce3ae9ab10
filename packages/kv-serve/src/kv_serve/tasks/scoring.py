"""How an answer, a continuation or a text is scored: pure functions."""

import re
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

_SEPARATOR = re.compile(r"(?<=\d)[,_\u00a0 ](?=\d{3}(?!\d))")


def found(generated: str, answer: str) -> bool:
    """Whether the whole number stands in the generated text, thousands separators ignored."""
    plain = re.compile(rf"(?<!\d){re.escape(answer)}(?!\d)")
    return any(plain.search(text) for text in (generated, _SEPARATOR.sub("", generated)))


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
