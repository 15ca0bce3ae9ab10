"""A synthetic model: the vectors of its heads, and their calibration."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kv_policy import CacheShape, Calibrated
from kv_svd import Calibration

FACTS = Calibrated(model="made up", fingerprint="0123456789abcdef", text="noise", digest="ff")


@dataclass(frozen=True)
class Made:
    """Vectors of all layers with directions of different sizes, as in real models."""

    shape: CacheShape
    query: Tensor  # N B H G L D
    key: Tensor  # N B H L D
    value: Tensor  # N B H L Dv
    output: Tensor  # N hidden QD

    def stacked(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the rows of both pairs of a layer, by KV head, stacked as in the paper."""
        q, k, v = self.query[layer], self.key[layer], self.value[layer]
        heads, dim = self.shape.kv_heads, self.shape.value_dim
        o = self.output[layer].unflatten(1, (heads, -1, dim)).permute(1, 0, 2, 3).flatten(1, 2)
        qk = [k.transpose(0, 1).flatten(1, 2), q.movedim(1, 0).flatten(1, 3)]
        return torch.cat(qk, 1), torch.cat([v.transpose(0, 1).flatten(1, 2), o], 1)

    def calibration(self, together: int = 1, *, read: bool = True) -> Calibration:
        """Run a calibration over all vectors."""
        found = Calibration(self.shape, self.output, together)
        if read:
            for i in range(self.shape.layers):
                found.see(i, self.query[i], self.key[i], self.value[i])
        return found

    def write(self, path: Path, together: int = 1, **changed: object) -> Path:
        """Write the result of the calibration."""
        self.calibration(together).write(path, replace(FACTS, **changed))
        return path


def make(
    layers: int = 2,
    heads: int = 4,
    group: int = 3,
    dim: int = 64,
    value_dim: int = 32,
    tokens: int = 90,
    seed: int = 0,
    spread: float = 2.0,
) -> Made:
    draw = torch.Generator().manual_seed(seed)

    def vectors(*sizes: int, dim: int, per: int = 1) -> Tensor:
        """Return vectors whose directions, per layer and head, span some decades in size."""
        turn = torch.linalg.qr(
            torch.randn(layers, heads, dim, dim, dtype=torch.float64, generator=draw)
        ).Q
        fall = spread * torch.rand(layers, heads, 1, dtype=torch.float64, generator=draw) + 0.5
        size = 10 ** -(fall * torch.arange(dim) / dim)
        mix = (size[..., None] * turn).reshape(layers, 1, heads, *[1] * (per - 1), dim, dim)
        noise = torch.randn(layers, 2, heads, *sizes, dim, dtype=torch.float64, generator=draw)
        return noise @ mix

    hidden = heads * group * dim // 2
    output = torch.randn(
        layers, hidden, heads * group * value_dim, dtype=torch.float64, generator=draw
    )
    return Made(
        CacheShape(layers, heads, group, dim, value_dim),
        vectors(group, tokens, dim=dim, per=2),
        vectors(tokens, dim=dim),
        vectors(tokens, dim=value_dim),
        output * torch.logspace(0, -1, value_dim, dtype=torch.float64).repeat(heads * group),
    )


@pytest.fixture(scope="session")
def made() -> Made:
    """A model of two layers with four KV heads of 64 and 32 dimensions."""
    return make()


@pytest.fixture(scope="session")
def make_model():
    """Return a factory for models of other sizes."""
    return make


@pytest.fixture(scope="session")
def file(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its statistics, with heads concatenated in pairs."""
    return made.write(tmp_path_factory.mktemp("found") / "found.safetensors", together=2)
