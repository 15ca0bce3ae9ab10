"""A rotation before an integer format: channels of outliers no longer set a token's scale."""

import pytest
import torch
from torch import Tensor

from kv_policy import CacheShape, parse, tier_formats
from kv_policy.testing import check_policy
from kv_svd.hadamard import rotation_of


@pytest.mark.parametrize(("key_dim", "value_dim"), [(80, 33), (7, 1), (96, 112)])
def test_odd_widths_follow_the_contract_under_a_format(key_dim: int, value_dim: int) -> None:
    check_policy(parse("hadamard+k4v4"), CacheShape(2, 4, 3, key_dim, value_dim))


@pytest.mark.parametrize("dim", [64, 80, 33])
def test_a_channel_of_outliers_no_longer_sets_the_scale_of_a_token(dim: int) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, 200, dim, generator=draw)
    x[..., 3] += 30
    (form,) = tier_formats(parse("k4v4"), CacheShape(1, 1, 1, dim, dim, torch.float32))
    turn = rotation_of(dim, 1)

    def stored(vectors: Tensor) -> Tensor:
        flat = vectors.reshape(-1, 1, dim)
        return form.key.decode(form.key.encode(flat)).reshape(vectors.shape)

    plain = (stored(x) - x).norm()
    turned = (turn.undo(stored(turn.project(x))[:, :, None])[:, :, 0] - x).norm()
    assert turned < 0.8 * plain
