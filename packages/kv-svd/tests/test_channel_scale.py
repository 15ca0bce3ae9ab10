"""Scales of channels before a codec: attention is unchanged, and large channels round less."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kv_policy import CacheShape, NotCalibratedError, keeps_shape, parse
from kv_policy.testing import check_policy
from kv_svd import ChannelScale

SPECS = ("channel-scale:file={}", "channel-scale:file={},keys=true")
each = pytest.mark.parametrize("spec", SPECS)


@each
def test_it_follows_the_contract(spec: str, made, file: Path) -> None:
    policy = parse(spec.format(file))
    assert isinstance(policy, ChannelScale)
    check_policy(policy, made.shape)
    check_policy(parse(f"{spec.format(file)}+raw"), made.shape)
    assert keeps_shape(policy.basis)
    assert policy.fitted_to == "0123456789abcdef"
    assert all(parameter.doc for parameter in policy.parameters())


@each
def test_attention_is_unchanged(spec: str, made, file: Path) -> None:
    for layer in range(made.shape.layers):
        basis = parse(spec.format(file)).basis.bind(layer, made.shape)
        q, k, v = made.query[layer], made.key[layer], made.value[layer]
        want = (q @ k[:, :, None].mT).softmax(-1) @ v[:, :, None]
        assert (basis.key is not None) == ("keys" in spec)
        assert basis.value is not None
        if basis.key is not None:
            q, k = basis.key.project_queries(q), basis.key.project(k)
        found = (q @ k[:, :, None].mT).softmax(-1) @ basis.value.project(v)[:, :, None]
        torch.testing.assert_close(basis.value.undo(found), want, rtol=1e-4, atol=1e-5)


@each
def test_channels_are_divided_by_the_root_of_their_root_mean_square(
    spec: str, made, file: Path
) -> None:
    """So what is stored of a channel has that root as its own root mean square."""
    basis = parse(spec.format(file)).basis
    for layer in range(made.shape.layers):
        bound = basis.bind(layer, made.shape)
        for maps, x in ((bound.key, made.key[layer]), (bound.value, made.value[layer])):
            if maps is not None:
                size = x.square().mean((0, 2)).sqrt()
                stored = maps.project(x).square().mean((0, 2)).sqrt()
                torch.testing.assert_close(stored, size.sqrt(), rtol=1e-4, atol=0)


def test_a_shard_has_the_scales_of_its_heads(made, file: Path) -> None:
    basis = parse(SPECS[1].format(file)).basis
    whole = basis.bind(1, made.shape)
    half = basis.bind(1, replace(made.shape, kv_heads=2, first_head=2))
    assert torch.equal(half.value.matrix, whole.value.matrix[2:])
    assert torch.equal(half.key.dual, whole.key.dual[2:])


def test_values_with_a_large_channel_lose_less(made, tmp_path: Path) -> None:
    size = torch.ones(made.shape.value_dim, dtype=torch.float64)
    size[5], size[9] = 40.0, 0.0  # and one that is always 0
    value = torch.randn(made.value.shape, dtype=torch.float64) * size
    path = replace(made, value=value).write(tmp_path / "large")
    maps = parse(SPECS[0].format(path)).basis.bind(0, made.shape).value

    def coded(x: torch.Tensor) -> torch.Tensor:
        """Round to 16 even steps from the smallest element of a vector to its largest."""
        low = x.amin(-1, keepdim=True)
        step = (x.amax(-1, keepdim=True) - low) / 15
        return (low + ((x - low) / step).round() * step).double()

    x = value[0].float()
    found = maps.undo(coded(maps.project(x)).float()[:, :, None])[:, :, 0]
    others = [d for d in range(made.shape.value_dim) if d != 5]
    plain, scaled = ((y - x)[..., others].norm() for y in (coded(x), found))
    assert scaled < plain / 3
    assert found.isfinite().all()


def test_what_is_refused(made, file: Path, tmp_path: Path) -> None:
    with pytest.raises(NotCalibratedError, match=r"channel-scale: .*nowhere does not exist"):
        ChannelScale(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"channel-scale needs file=\.\.\., which has no default"):
        parse("channel-scale")
    policy = ChannelScale(str(file))
    with pytest.raises(ValueError, match="64 dimensions in a key, but this cache has 5"):
        policy.bind(0, CacheShape(2, 4, 3, 5, 32))
    with pytest.raises(ValueError, match="both define the basis in which vectors are stored"):
        parse(f"channel-scale:file={file}+hadamard")
