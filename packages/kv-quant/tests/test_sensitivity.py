"""How far errors move attention: the derivatives that autograd gives, token by token."""

import pytest
import torch
from torch import Tensor

from kv_quant import sensitivity as module
from kv_quant.sensitivity import sensitivity


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention of every query, one at a time."""
    scale = key.shape[-1] ** -0.5
    rows = []
    for i in range(key.shape[2]):
        logit = query[:, :, :, i] @ key[:, :, : i + 1].mT * scale
        rows.append(logit.softmax(-1) @ value[:, :, : i + 1])
    return torch.stack(rows, dim=3)


def vectors(batch: int, heads: int, group: int, length: int, dims: tuple[int, int]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(length)
    sizes = (batch, heads, group, length, dims[0]), (batch, heads, length, dims[0])
    sizes = (*sizes, (batch, heads, length, dims[1]))
    return [torch.randn(size, generator=draw, dtype=torch.float64) for size in sizes]


@pytest.mark.parametrize("at_once", [1, 4, 256])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1, (1, 1)), (2, 3, 2, 7, (5, 3)), (1, 2, 3, 9, (4, 6))]
)
def test_weights_are_squared_derivatives_of_the_outputs(
    sizes: tuple[int, int, int, int, tuple[int, int]],
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_QUERIES", at_once)
    query, key, value = vectors(*sizes)
    found = sensitivity(query, key, value)
    jacobian = torch.autograd.functional.jacobian(
        lambda k, v: attention(query, k, v).flatten(), (key, value)
    )
    of_key, of_value = (each.square().sum(0) for each in jacobian)
    torch.testing.assert_close(found.key, of_key, rtol=1e-9, atol=1e-12)
    each = found.value[..., None].expand_as(of_value)
    torch.testing.assert_close(each, of_value, rtol=1e-9, atol=1e-12)
    exact = float(attention(query, key, value).square().sum())
    assert found.output == pytest.approx(exact, rel=1e-12)
