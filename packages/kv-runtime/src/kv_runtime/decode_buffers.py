"""Fixed memory for the metadata of decode steps over slots, so that a step can be captured once.

A captured CUDA graph launches again what it recorded: kernels with the same grids, numbers and
addresses. So a captured step reads its metadata from memory that later steps fill, and nothing that
it is launched with depends on the lengths, blocks or slots of a step.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from kv_attention import AttentionInputs, DenseTokens, can_capture
from kv_paging import can_capture_pages, page_kernels_of
from kv_policy import PagedTokens
from kv_runtime.slots import Blocks, SlotBatch, SlotLayer, SlotStep


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """Metadata of decode steps with one new token per request, at fixed addresses.

    Steps of equally many requests, padding included, have tensors of the same addresses, shapes and
    strides. A step's metadata is valid until the next step fills the memory; launches on one stream
    are in this order.
    """

    blocks: Blocks
    longest: int  # tokens of the longest request
    page: Int[Tensor, "R H"]  # as in `SlotStep`, by request
    slot: Int[Tensor, "R H"]
    table: Int[Tensor, "R H T"]  # as in `SlotBatch`, by request
    stored: Int[Tensor, "R H"]
    position: Int[Tensor, "R 1"]
    head: Int[Tensor, " H"]  # 0, 1, ...

    @classmethod
    def of(
        cls, blocks: Blocks, requests: int, longest: int, device: torch.device
    ) -> "DecodeBuffers":
        """Allocate the memory of up to `requests` requests of up to `longest` tokens.

        It has four bytes for each request, KV head and block of the longest request.
        """
        heads, columns = blocks.heads, -(-longest // blocks.layout.tokens)
        page = torch.zeros(requests, heads, dtype=torch.int64, device=device)
        table = torch.zeros(requests, heads, columns, dtype=torch.int32, device=device)
        return cls(
            blocks,
            longest,
            page,
            torch.zeros_like(page),
            table,
            torch.zeros_like(page, dtype=torch.int32),
            torch.full_like(page[:, :1], -1),
            torch.arange(heads, dtype=torch.int32, device=device),
        )

    @property
    def requests(self) -> int:
        """The most requests of a step, including padding."""
        return len(self.position)

    def step(
        self,
        count: int,
        length: Int[Tensor, " B"],
        longest: int,
        table: Int[Tensor, "B W"],
        slot: Int[Tensor, " n"],
    ) -> SlotStep:
        """Fill the memory, and return the metadata of a step; nothing is read from the device.

        Args:
            count: requests with a new token, the first of B; the others are padding: they attend to
                nothing, their output is 0, and their tokens are written to block 0, which an engine
                gives to no request.
            length: tokens of each request, including the new one.
            longest: upper bound of the first `count` of `length`.
            table: block table of each request, in order.
            slot: slot of each new token, `count` or more, as in `Blocks.step`.

        Raises:
            ValueError: there are more requests, or longer ones, than there is memory for.
        """
        every, columns = len(length), -(-longest // self.blocks.layout.tokens)
        if every > self.requests or longest > self.longest:
            raise ValueError(
                f"a step has {every} requests of up to {longest} tokens, and its memory is for "
                f"{self.requests} of up to {self.longest}"
            )
        page, place = self.page[:every], self.slot[:every]
        given = self.blocks.places(slot[:count])
        for held, new in zip((page, place), given, strict=True):
            held[:count].copy_(new.view(count, -1))
        page[count:] = self.head
        place[count:] = 0
        stored, position = self.stored[:every], self.position[:every]
        torch.sub(length[:count, None], 1, out=position[:count])
        position[count:] = -1
        stored[:count] = position[:count]
        stored[count:] = 0
        pages, block = self.table[:every], table[:count, None, :columns]
        # The rest of a row is never read, as it is past the row's tokens.
        into = pages[:count, :, : block.shape[2]]
        torch.add(self.head[:, None], block, alpha=self.blocks.heads, out=into)
        rows = slice(0, every)
        batch = SlotBatch(position, pages, stored, self.longest, rows, None, rows)
        return SlotStep(self.blocks, page.view(-1), place.view(-1), (batch,))


def captures(
    layer: SlotLayer, blocks: Blocks, queries: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether a layer's decode steps can be captured in a CUDA graph.

    That is so where kernels for GPUs compute them, whose launches depend on the number of requests
    alone. Backends leave some inputs to torch, whose operations wait for the device.

    Args:
        layer: the layer.
        blocks: its blocks.
        queries: its query heads.
        dtype: dtype of queries and of new tokens.
        device: the device.
    """
    form, heads = blocks.layout.format, blocks.heads
    key = torch.zeros(1, heads, 1, form.key.dim, dtype=dtype, device=device)
    value = torch.zeros(1, heads, 1, form.value.dim, dtype=dtype, device=device)
    query = key[:, :, None].expand(-1, -1, queries // heads, -1, -1)
    number = torch.zeros(1, heads, 1, dtype=torch.int32, device=device)
    data = torch.zeros(1, blocks.layout.nbytes, dtype=torch.uint8, device=device)
    pages = PagedTokens(data, number, number[..., 0], blocks.layout, longest=0)
    position = number[:, 0].long()
    inputs = AttentionInputs(
        query,
        position,
        (pages,),
        (DenseTokens(key, value, position),),
        (None,),
        form.value.dim,
        layer.scale,
        softcap=layer.softcap,
        sinks=layer.sinks,
    )
    name = page_kernels_of(layer.backend)
    written = can_capture_pages(name, blocks.layout, device)
    return written and can_capture(layer.backend, inputs)
