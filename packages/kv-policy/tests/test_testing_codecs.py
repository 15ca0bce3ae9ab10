"""The check of codecs detects each broken law."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from kv_policy import BitLayout, PlaneLayout, RawCodec
from kv_policy.testing import check_codec


@dataclass(frozen=True)
class Eight:
    """8-bit integers from -1 to 1; subclasses break it."""

    dim: int = 12
    block: ClassVar[int] = 1

    @property
    def layout(self) -> BitLayout | None:
        return BitLayout(self.dim, 8, self.dim)

    @property
    def parts(self) -> tuple[int, ...]:
        return (self.dim, 4)

    def encode(self, x: Tensor) -> Tensor:
        codes = ((x[:, 0].float().nan_to_num().clamp(-1, 1) + 1) * 127).round().to(torch.uint8)
        meta = torch.tensor([1 / 127, -1], dtype=torch.float16).view(torch.uint8)
        return torch.cat([codes, meta.expand(len(x), 4)], 1)

    def decode(self, data: Tensor) -> Tensor:
        scale = torch.tensor(1 / 127, dtype=torch.float16).float()
        return (data[:, : self.dim].float() * scale - 1)[:, None]

    def bound(self, x: Tensor) -> Tensor:
        return (x.abs() - 1).clamp(min=0).double() + 0.006


def test_a_good_codec_passes() -> None:
    check_codec(Eight())
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        check_codec(RawCodec(7, dtype))


@dataclass(frozen=True)
class Uneven:
    """Codes of 3 bits, of levels from -1 to 1."""

    dim: int = 12
    block: ClassVar[int] = 1
    levels: ClassVar[tuple[float, ...]] = (-1.0, -0.75, -0.25, 0.0, 0.125, 0.25, 0.5, 1.0)

    @property
    def layout(self) -> PlaneLayout:
        return PlaneLayout(self.dim, 3, self.dim, levels=self.levels)

    @property
    def parts(self) -> tuple[int, ...]:
        return self.layout.parts

    def encode(self, x: Tensor) -> Tensor:
        inner = x[:, 0].float().nan_to_num().clamp(-1, 1)
        codes = (inner[..., None] - torch.tensor(Uneven.levels)).abs().argmin(-1)
        data = torch.zeros(len(x), sum(self.parts), dtype=torch.uint8)
        data[:, -2:] = torch.ones(1, dtype=torch.float16).view(torch.uint8)
        for d in range(self.dim):
            for bit in range(3):
                byte, at = self.layout.place(d, bit)
                data[:, byte] |= ((codes[:, d] >> bit & 1) << at).to(torch.uint8)
        return data

    def decode(self, data: Tensor) -> Tensor:
        codes = torch.zeros(len(data), self.dim, dtype=torch.long)
        for d in range(self.dim):
            for bit in range(3):
                byte, at = self.layout.place(d, bit)
                codes[:, d] |= (data[:, byte].long() >> at & 1) << bit
        return torch.tensor(Uneven.levels)[codes][:, None]

    def bound(self, x: Tensor) -> Tensor:
        return (x.abs() - 1).clamp(min=0).double() + 0.26


def test_a_good_codec_of_levels_passes() -> None:
    check_codec(Uneven())


class Mirrored(Uneven):
    levels = tuple(-x for x in reversed(Uneven.levels))


class Short(Eight):
    @property
    def parts(self) -> tuple[int, ...]:
        return (self.dim, 5)


class Signed(Eight):
    def encode(self, x: Tensor) -> Tensor:
        return super().encode(x).to(torch.int16)


class Boastful(Eight):
    def bound(self, x: Tensor) -> Tensor:
        return torch.full(x.shape, 0.001)


class Vague(Eight):
    def bound(self, x: Tensor) -> Tensor:
        return torch.full(x.shape, torch.inf)


class Batchwise(Eight):
    def encode(self, x: Tensor) -> Tensor:
        return super().encode(x / x.abs().amax().clamp(min=1))

    def bound(self, x: Tensor) -> Tensor:
        return torch.full(x.shape, 1e38)


class Leaky(Eight):
    def encode(self, x: Tensor) -> Tensor:
        return super().encode(x.where(x.isfinite().all(), 0))


class Moved(Eight):
    """Codes are in reverse order, contrary to the layout."""

    def encode(self, x: Tensor) -> Tensor:
        return super().encode(x.flip(-1))

    def decode(self, data: Tensor) -> Tensor:
        return super().decode(data).flip(-1)


class Shared(Eight):
    """The layout shares a scale between two tokens, but a block has one token."""

    @property
    def layout(self) -> BitLayout | None:
        return BitLayout(self.dim, 8, self.dim, tokens=2)


class Whole(Eight):
    def decode(self, data: Tensor) -> Tensor:
        return super().decode(data.view(torch.float32).view(torch.uint8))


class Eager(Eight):
    def encode(self, x: Tensor) -> Tensor:
        return super().encode(x.clamp_(-1, 1))


class Nonempty(Eight):
    def decode(self, data: Tensor) -> Tensor:
        return super().decode(data) + data.max() * 0


class Noisy(Eight):
    def encode(self, x: Tensor) -> Tensor:
        return super().encode(x + torch.rand(()) * 0.01)


@pytest.mark.parametrize(
    ("broken", "law"),
    [
        (Short, "promise (12, 17)"),
        (Signed, "encode returns torch.int16; it must return uint8"),
        (Boastful, "for normal vectors"),
        (Vague, "the bound of normal vectors is infinite"),
        (Batchwise, "a block encoded alone has other bytes than the same block in a batch"),
        (Leaky, "an infinity or a NaN in one block changes the bytes of another"),
        (Moved, "decode does not return code * scale + zero of its own layout"),
        (Mirrored, "decode does not return level * scale of its own layout"),
        (Shared, "2 tokens that share scales and parts (12, 0); the codec has 12, blocks of 1"),
        (Whole, "decode failed on bytes inside a page"),
        (Eager, "encode changed its input"),
        (Nonempty, "decode failed on the bytes of no vectors"),
        (Noisy, "encode returns other bytes when repeated"),
    ],
)
def test_a_broken_codec_is_told_its_law(broken: type[Eight | Uneven], law: str) -> None:
    with pytest.raises(AssertionError) as error:
        check_codec(broken())
    assert law in str(error.value)
