"""Scores of answers, by their definitions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_eval.tasks import agreement_share, found, nats_per_token


@pytest.mark.parametrize(
    ("said", "right"),
    [
        (" 4821396.", True),
        ('The number is "4821396"', True),
        ("4,821,396", True),
        ("4 821 396 it is", True),
        ("482139", False),
        ("14821396", False),
        ("48213960", False),
        ("4,821,3967", False),
        ("", False),
    ],
)
def test_found(said: str, right: bool) -> None:
    assert found(said, "4821396") is right


@given(
    length=st.integers(1, 9),
    vocabulary=st.integers(2, 30),
    scale=st.floats(0.1, 50),
    seed=st.integers(0, 2**31),
)
def test_nats_against_their_definition(length, vocabulary, scale, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(length, vocabulary, generator=generator) * scale
    targets = torch.randint(vocabulary, (length,), generator=generator)
    rows = logits.double().tolist()
    expected = [
        math.log(math.fsum(math.exp(value - row[target]) for value in row))
        for row, target in zip(rows, targets.tolist(), strict=True)
    ]
    assert nats_per_token(logits, targets) == pytest.approx(math.fsum(expected) / length, abs=1e-9)


def test_agreement_share() -> None:
    assert agreement_share([1, 2, 3, 4], [1, 2, 3, 4]) == 1
    assert agreement_share([1, 2, 9, 4], [1, 2, 3, 4]) == 0.75
    assert agreement_share([1, 2], [1, 2, 3, 4]) == 0.5
    assert agreement_share([1, 2, 3, 4, 5, 6], [1, 2]) == 1
    assert agreement_share([], [1]) == 0
    with pytest.raises(ValueError, match="at least one"):
        agreement_share([1], [])
