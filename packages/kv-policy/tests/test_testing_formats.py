"""The conformance check detects each law that formats and bases can break."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from kv_policy import CacheShape, HeadBasis, LayerBasis, Part, RawCodec, TokenFormat
from kv_policy.testing import check_policy


@dataclass(frozen=True)
class Store(Part):
    """Formats passed in by the test."""

    name: ClassVar[str] = "store"
    tiers: ClassVar[int] = 1
    window: ClassVar[int] = 0
    bound: ClassVar[object] = None

    @property
    def formats(self) -> "Store":
        return self

    def bind(self, shape: CacheShape) -> object:
        return self.bound


def format(key: int = 64, value: int = 32) -> TokenFormat:
    return TokenFormat(RawCodec(key, torch.float16), RawCodec(value, torch.float16))


@pytest.mark.parametrize(
    ("answers", "law"),
    [
        ({"window": -1}, "the raw window is -1 tokens"),
        ({"tiers": 0}, "formats has 0 tiers"),
        ({"bound": None}, "it must return a tuple of TokenFormat"),
        ({"bound": (format(), format())}, "bind returns 2 formats and tiers is 1"),
        ({"bound": (format(32, 64),)}, "bind returns codecs for 32 and 64 dimensions"),
    ],
)
def test_broken_formats_are_told_their_law(answers: dict[str, object], law: str) -> None:
    with pytest.raises(AssertionError, match=law):
        check_policy(type("Broken", (Store,), answers)())
    check_policy(type("Right", (Store,), {"bound": (format(),)})())


@dataclass(frozen=True)
class Rotated(Part):
    name: ClassVar[str] = "rotated"
    cut: bool = True

    @property
    def basis(self) -> "Rotated":
        return self

    def bind(self, layer: int, shape: CacheShape) -> LayerBasis:
        matrix = torch.linalg.qr(torch.randn(4, 64, 64, generator=torch.manual_seed(layer))).Q
        first = shape.first_head if self.cut else 0
        matrix = matrix[first : first + shape.kv_heads]
        return LayerBasis(key=HeadBasis(matrix, (64,) * len(matrix)))


def test_a_basis_is_cut_to_the_heads_of_its_shard() -> None:
    check_policy(Rotated())
    with pytest.raises(
        AssertionError, match="layer 0's key basis differs between a shard of the heads"
    ):
        check_policy(Rotated(cut=False))
    with pytest.raises(AssertionError, match="expected 8 heads of 64 dimensions"):
        check_policy(Rotated(), CacheShape(2, 8, 1, 64, 64))
