"""Attention over LeanKV's tiers and its window equals attention over the dequantized tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kv_attention import DenseTokens, attend
from kv_paging import PagePool, Tiers, fit
from kv_policy import CacheShape, Raw, read_formats

SHAPE = CacheShape(layers=1, kv_heads=2, group=3, key_dim=64, value_dim=64, dtype=torch.float32)
PAIRS = [
    ("k8v4", "k4v2"),
    ("k4v2", "k4v1"),
    ("k8v8", "k8v4"),
    ("k4v4:keys=channel", "k4v2"),
    ("k8v4", "k4v2:keys=channel"),
    ("k4v4:keys=channel", "k4v2:keys=channel"),
]


def oracle(query: Tensor, key: Tensor, value: Tensor, held: Tensor, scale: float) -> Tensor:
    """Plain attention in float64 over the tokens that are held."""
    logits = (query.double() @ key.double()[:, :, None].mT * scale).masked_fill(
        ~held[:, :, None, None], -torch.inf
    )
    return logits.softmax(-1) @ value.double()[:, :, None].masked_fill(
        ~held[:, :, None, :, None], 0
    )


@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.integers(0, 10_000),
    st.integers(1, 3),
    st.sampled_from([0, 1, 33, 90]),
    st.sampled_from([0, 1, 40, 77]),
    st.integers(1, 9),
)
def test_two_tiers_and_a_window(
    pair: tuple[str, str], seed: int, sequences: int, high: int, low: int, window: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    formats = [read_formats(name).bind(SHAPE)[0] for name in pair]
    layouts = fit(formats, 16, True, True)
    pool = PagePool(layouts[0].nbytes, poison=True)
    tiers = Tiers(pool, layouts, 1, sequences, 2, raw=Raw().bind(SHAPE)[0])

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random) * 3

    rows = 2 * sequences
    for tier, most in enumerate((high, low)):
        keep = torch.rand(rows, most, generator=random) < 0.8  # heads keep different numbers
        position = torch.arange(most).expand(rows, -1)
        key, value, score = normal(rows, most, 64), normal(rows, most, 64), normal(rows, most)
        tiers.append(tier, tiers.table_rows(), key, value, keep, score, position)
        store = tiers.stores[tiers.tier.index(tier)]
        stays = torch.rand(rows, max(1, store.longest), generator=random) < 0.9  # leaves holes
        store.compact(tiers.table_rows(), stays)
    place = torch.arange(200, 200 + window).expand(sequences, -1)
    recent = [normal(sequences, 2, window, 64) for _ in range(2)]
    query = normal(sequences, 2, 3, 1, 64)

    found = attend(
        query,
        torch.full((sequences, 1), 200 + window),
        tiers.views(0),
        [DenseTokens(*recent, place, full=True)],
        0.125,
    ).out
    reads = [store.read_layer(0, frozenset({"keys", "values"})) for store in tiers.stores]
    all_held = torch.ones(sequences, 2, window, dtype=torch.bool)
    held = torch.cat([*(r.held.unflatten(0, (-1, 2)) for r in reads), all_held], 2)
    key = torch.cat([*(r.key.unflatten(0, (-1, 2)) for r in reads), recent[0]], 2)
    value = torch.cat([*(r.value.unflatten(0, (-1, 2)) for r in reads), recent[1]], 2)
    expected = oracle(query, key, value, held, 0.125)
    error = (found.double() - expected).norm() / expected.norm()
    assert error < 1e-5
    assert found.isfinite().all()
