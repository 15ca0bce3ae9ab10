"""ExpectedAttention against its formulas, written out head by head and token by token."""

import math

import pytest
import torch
from torch import Tensor

from kv_evict import ExpectedAttention
from kv_policy import Budget, CacheShape, LayerView, Queries, Rope, parse
from kv_policy.testing import check_policy

ROPE = Rope((1.0, 0.3, 0.05))
SHAPE = CacheShape(layers=1, kv_heads=2, group=2, key_dim=6, value_dim=4, rope=ROPE)


@pytest.mark.parametrize(
    "policy",
    [
        ExpectedAttention(),
        ExpectedAttention(Budget(30, "percent"), future=7, sinks=0, epsilon=0.01),
    ],
    ids=str,
)
def test_the_contract_holds(policy: ExpectedAttention) -> None:
    check_policy(policy)


def turned(x: Tensor, place: int) -> Tensor:
    """Rotate by the explicit RoPE matrix of a position."""
    matrix = torch.zeros(6, 6, dtype=torch.float64)
    for i, frequency in enumerate(ROPE.frequencies):
        cos, sin = math.cos(place * frequency), math.sin(place * frequency)
        matrix[i, i], matrix[i, i + 3] = cos, -sin
        matrix[i + 3, i], matrix[i + 3, i + 3] = sin, cos
    return matrix @ x


def by_hand(policy: ExpectedAttention, view: LayerView, b: int, h: int) -> list[float]:
    """Return the score of each token of a head except the sinks, in order."""
    assert view.queries is not None
    assert view.keys is not None
    assert view.values is not None
    places = [i for i, p in enumerate(view.position[b, h].tolist()) if p >= policy.sinks]
    weight = torch.zeros(len(places), dtype=torch.float64)
    average = (
        sum(
            torch.stack([turned(e, int(view.length[b]) + t) for e in torch.eye(6).double()], 1)
            for t in range(policy.future)
        )
        / policy.future
    )
    for g in range(2):
        plain = [
            turned(view.queries.vectors[b, h, g, i].double(), -p)
            for i, p in enumerate(view.queries.position[b].tolist())
            if p >= policy.sinks
        ]
        mean = sum(plain) / len(plain)
        covariance = sum(torch.outer(x - mean, x - mean) for x in plain) / len(plain)
        mean, covariance = average @ mean, average @ covariance @ average.T
        logits = []
        for i in places:
            key = view.keys[b, h, i].double()
            logits.append(mean @ key / math.sqrt(6) + key @ covariance @ key / 12)
        weight += torch.stack(logits).softmax(0) / 2
    norms = [view.values[b, h, i].double().norm() for i in places]
    return [float((w + policy.epsilon) * n) for w, n in zip(weight, norms, strict=True)]


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("epsilon", [0.0, 0.02])
def test_a_score_is_the_expected_attention_times_the_norm(sinks: int, epsilon: float) -> None:
    policy = ExpectedAttention(future=5, sinks=sinks, epsilon=epsilon)
    draw = torch.Generator().manual_seed(3)
    lengths = torch.tensor([13, 8])
    position = torch.arange(13).expand(2, 2, 13).clone()
    position[1, :, 8:] = -1  # the second sequence is shorter
    asked = torch.arange(13).expand(2, 13).clone()
    asked[1, 8:] = -1
    there = (position >= 0)[..., None]
    view = LayerView(
        layer=torch.zeros_like(lengths),
        shape=SHAPE,
        position=position,
        fresh=position >= 0,
        score=torch.zeros(2, 2, 13),
        length=lengths,
        keys=torch.randn(2, 2, 13, 6, generator=draw) * there,
        values=torch.randn(2, 2, 13, 4, generator=draw) * there,
        queries=Queries(torch.randn(2, 2, 2, 13, 6, generator=draw), asked),
        rope=SHAPE.rope,
    )
    found = policy.score(view)
    for b, length in enumerate(lengths.tolist()):
        for h in range(2):
            assert found[b, h, :sinks].isinf().all()
            assert found[b, h, sinks:length].tolist() == pytest.approx(
                by_hand(policy, view, b, h), rel=1e-4
            )


def test_queries_of_the_future_are_turned_alike_whenever_they_were_asked() -> None:
    # The same unrotated query at other positions predicts the same future attention.
    plain = torch.randn(1, 6, dtype=torch.float64)
    scores = []
    for places in ((4, 5, 6), (20, 33, 47)):
        vectors = torch.stack([turned(plain[0], p) for p in places])[None, None, None]
        key = torch.randn(1, 2, 9, 6, generator=torch.Generator().manual_seed(1))
        position = torch.arange(41, 50).expand(1, 2, 9)
        scores.append(
            ExpectedAttention(future=3).score(
                LayerView(
                    layer=torch.tensor([0]),
                    shape=SHAPE,
                    position=position,
                    fresh=position >= 0,
                    score=torch.zeros(1, 2, 9),
                    length=torch.tensor([50]),
                    keys=key,
                    values=key[..., :4],
                    queries=Queries(vectors.expand(1, 2, 2, 3, 6).float(), torch.tensor([places])),
                    rope=SHAPE.rope,
                )
            )
        )
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-5)


def test_text_form_and_what_it_refuses() -> None:
    policy = ExpectedAttention(Budget(64), future=32, sinks=2)
    assert parse(str(policy)) == policy
    for text, sentence in (
        ("future=0", "future=0 is refused"),
        ("epsilon=-1", "epsilon=-1 is refused"),
        ("budget=3", "smaller than the 4 it protects"),
    ):
        with pytest.raises(ValueError, match=sentence):
            parse(f"expected-attention:{text}")
