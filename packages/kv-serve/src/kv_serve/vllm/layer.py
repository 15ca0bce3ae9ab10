"""Attention of one layer over pages inside vLLM's blocks."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from kv_attention import DenseTokens, attend
from kv_paging.moves import format_segments, put
from kv_policy import PagedTokens, PageLayout, TokenFormat
from kv_serve.vllm.step import Batch, Step


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """Stores new tokens in one format, and lets them see what is stored.

    A new token is stored first and then seen as it is stored, by itself too. So what a token sees
    depends neither on how the scheduler cuts a prompt nor on whether a prefix was cached.
    """

    format: TokenFormat
    scale: float

    def forward(
        self,
        query: Float[Tensor, "m Q D"],
        key: Float[Tensor, "m H D"],
        value: Float[Tensor, "m H Dv"],
        cache: UInt8[Tensor, "blocks H tokens nbytes"],
        step: Step,
        output: Float[Tensor, "m Q Dv"],
    ) -> None:
        """Store the new tokens of a step in `cache` and write what they see to `output`."""
        layout = PageLayout.sized(self.format, cache.shape[2])
        pages = cache.view(-1, layout.nbytes)
        new = step.slot.shape[0]
        stored = self._store(pages, layout, (key[:new], value[:new]), step)
        for batch in step.batches:
            tokens = PagedTokens(pages, batch.table, batch.stored, layout)
            out = self._attend(query, tokens, stored, batch)
            real = batch.position >= 0
            output[batch.row[real]] = out[real]

    def _store(
        self,
        pages: UInt8[Tensor, "P nbytes"],
        layout: PageLayout,
        vectors: tuple[Float[Tensor, "n H D"], Float[Tensor, "n H Dv"]],
        step: Step,
    ) -> tuple[UInt8[Tensor, "n H key_bytes"], UInt8[Tensor, "n H value_bytes"]]:
        """Encode new tokens, write them to their pages and give their bytes."""
        page = step.page.flatten()
        slot = step.slot[:, None].expand_as(step.page).flatten()
        segments = iter(format_segments(layout))
        stored = []
        for codec, x in zip((self.format.key, self.format.value), vectors, strict=True):
            data = codec.encode(x.flatten(0, 1)[:, None])
            for part in torch.split(data, list(codec.parts), dim=1):
                put(pages, next(segments), page, slot, part)
            stored.append(data.view(*step.page.shape, -1))
        return stored[0], stored[1]

    def _attend(
        self,
        query: Float[Tensor, "m Q D"],
        tokens: PagedTokens,
        stored: tuple[UInt8[Tensor, "n H key_bytes"], UInt8[Tensor, "n H value_bytes"]],
        batch: Batch,
    ) -> Float[Tensor, "B L Q Dv"]:
        """Let the new tokens of some requests see what is stored of their sequences."""
        dense: tuple[DenseTokens, ...] = ()
        if not batch.single:
            key, value = (
                codec.decode(data[batch.row].flatten(0, 2))
                .view(*batch.row.shape, -1, codec.dim)
                .transpose(1, 2)
                .to(query.dtype)
                for codec, data in zip((self.format.key, self.format.value), stored, strict=True)
            )
            dense = (DenseTokens(key, value, batch.position),)
        heads, dim = tokens.table.shape[1], self.format.key.dim
        q = query[batch.row].view(*batch.row.shape, heads, -1, dim).permute(0, 2, 3, 1, 4)
        out = attend(q, batch.position, (tokens,), dense, self.scale).out
        return out.permute(0, 3, 1, 2, 4).flatten(2, 3)
