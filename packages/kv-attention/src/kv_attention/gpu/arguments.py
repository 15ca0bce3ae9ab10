"""A part of the tokens as kernel arguments: tensors, strides and compile-time constants.

What varies from step to step must not make Triton compile a kernel again, see
`kv_policy.launching`.
"""

from dataclasses import dataclass
from math import gcd
from typing import Any, Final, TypeAlias

import torch
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from kv_attention.checks import longest_of
from kv_attention.tokens import DenseTokens
from kv_policy import PagedTokens, TileCounts
from kv_policy.described import NUMBERS, described
from kv_policy.launching import strides_of

LOG2E: Final = 1.4426950408889634  # kernels compute logits in base 2
WIDEST: Final = 512  # dimensions of a tile
PLAIN: Final = 4  # the number kind of dense tensors, whose dtype is separate
Form: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PartArguments:
    """A part of the tokens of a layer.

    Attributes:
        tokens: Kernel arguments that locate the tokens, see `tiles`.
        table: Their page table, or the positions of dense tokens, with adjacent columns.
        pitch: Stride of the rows of `table`.
        length: Slots of each table row, [table_rows]; None: all of `width`.
        width: Upper bound of the slots per table row, if requested.
        paged: Whether the tokens are in pages.
        key: FORM of keys, see `reading`.
        value: FORM of values.
        page: Tokens of a page, offset of positions or -1, whether the table is reversed, and the
            alignment of addresses.
        tiles: As in `PagedTokens`.
    """

    tokens: tuple[Any, ...]
    table: Tensor
    pitch: int
    length: Int[Tensor, " R"] | None
    width: int
    paged: bool
    key: Form
    value: Form
    page: tuple[int, int, bool, int] = (1, -1, False, 1)
    tiles: TileCounts | None = None

    def lengths(self, table_rows: int, device: torch.device) -> Int[Tensor, " R"]:
        """Return the slots of each table row."""
        if self.length is not None:
            return self.length
        return torch.full((table_rows,), self.width, dtype=torch.int32, device=device)

    def products(self, q: torch.dtype, *, interpreted: bool) -> tuple[Any, ...]:
        """Return the dtypes of products with keys and with values, for queries of a dtype."""
        return tuple(computed(form, q, bf16=not interpreted) for form in (self.key, self.value))

    def constants(self, q: torch.dtype, *, interpreted: bool, asm: bool) -> dict[str, Any]:
        """Return the compile-time constants of a kernel that reads these tokens."""
        key, rest = tiles_of_keys(self.key[1])
        return {
            "PAGED": self.paged,
            "AS": self.products(q, interpreted=interpreted),
            "PADDED": (key, padded(self.value[1])),
            "REST": rest,
            "KEY": self.key,
            "PAGE": self.page,
            "ASM": asm,
        }


def computed(form: Form, q: torch.dtype, *, bf16: bool) -> Any:
    """Return the dtype of a product: at least as precise as the query and the stored vector.

    Codes are exact in float16. Without `bf16`, as in Triton's interpreter, float32 replaces
    bfloat16.
    """
    kind = form[0] if form[0] != PLAIN else form[5]
    if q == torch.float32 or kind == NUMBERS[torch.float32]:
        return tl.float32
    if kind == NUMBERS[torch.bfloat16]:
        return tl.bfloat16 if bf16 and q == torch.bfloat16 else tl.float32
    return tl.float16


def paged_part(pages: PagedTokens, *, watched: bool) -> PartArguments:
    """Return the arguments of a tier; `width` is computed only if the part is observed."""
    found = described(pages.layout)
    tokens, *places = found.places
    key = (*found.formats[:4], places[0], places[1])
    value = (*found.formats[4:], places[2], places[3])
    positions = found.positions if pages.holes else -1
    data = pages.data if pages.data.stride(1) == 1 else pages.data.contiguous()
    table = pages.table.to(torch.int32).contiguous()
    fields = [data.data_ptr(), data.stride(0), positions if positions >= 0 else 0]
    for form in (key, value):
        fields += [form[5], 4] if form[0] == 0 else [form[4], 4 if form[0] == 1 else 2]
    return PartArguments(
        (data, data.stride(0)),
        table,
        table.shape[2],
        pages.length.to(torch.int32).reshape(-1).contiguous(),
        longest_of(pages) if watched else 0,
        True,
        key,
        value,
        (tokens, positions, pages.reverse, gcd(4, *fields)),
        pages.tiles,
    )


def dense_part(dense: DenseTokens) -> PartArguments:
    """Return the arguments of dense tokens."""
    key, value = adjacent(dense.key), adjacent(dense.value)
    place = adjacent(dense.position)
    tokens = (key, strides_of(key), value, strides_of(value))
    forms = [(PLAIN, x.shape[-1], 0, 0, 0, NUMBERS[x.dtype]) for x in (key, value)]
    width = place.shape[1]
    return PartArguments(tokens, place, place.stride(0), None, width, False, forms[0], forms[1])


def padded(dim: int) -> int:
    """Round up to a power of two of at least 16, the minimum of tensor cores."""
    return max(16, 1 << (dim - 1).bit_length())


def tiles_of_keys(dim: int) -> tuple[int, int]:
    """Return the padded dimensions of the tile of keys, and of a second one for the rest, or 0.

    Padding the 576 dimensions of latents to a power of two would almost double them.
    """
    return (padded(dim), 0) if dim <= WIDEST else (WIDEST, padded(dim - WIDEST))


def adjacent(x: Tensor) -> Tensor:
    """Return a tensor whose last dimension is adjacent in memory, a copy if it is not."""
    return x if x.stride(-1) == 1 else x.contiguous()
