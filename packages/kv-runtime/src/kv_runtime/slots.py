"""Attention of one layer over pages inside vLLM's blocks."""

from dataclasses import dataclass

from jaxtyping import Float, UInt8
from torch import Tensor

from kv_attention import DenseTokens, attend
from kv_policy import PagedTokens, TokenFormat
from kv_serve.vllm.step import Step


@dataclass(frozen=True, slots=True)
class SlotLayer:
    """Stores tokens in one format, and lets new ones see what is stored.

    New tokens see those of earlier steps as they are stored, and those of their own step as they
    are: a prompt that comes in one piece is read uncompressed, and what is generated after it, or
    after a prefix that was cached, sees compressed tokens. This is how the formats' papers measure
    them, and what a compressed cache does under transformers.
    """

    format: TokenFormat
    scale: float
    backend: str

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
        layout = step.blocks.layout
        pages = cache.view(-1, layout.nbytes)
        self._store(pages, key, value, step)
        for batch in step.batches:
            tokens = PagedTokens(pages, batch.table, batch.stored, layout, longest=batch.longest)
            row, place = batch.row, batch.position
            fresh = DenseTokens(
                key[row].transpose(1, 2), value[row].transpose(1, 2), place, full=batch.full
            )
            heads, dim = key.shape[1:]
            q = query[row].view(*row.shape, heads, -1, dim).permute(0, 2, 3, 1, 4)
            out = attend(q, place, (tokens,), (fresh,), self.scale, backend=self.backend).out
            out = out.permute(0, 3, 1, 2, 4).flatten(2, 3)
            if batch.full:
                output[row] = out
            else:
                real = place >= 0
                output[row[real]] = out[real]

    def _store(
        self,
        pages: UInt8[Tensor, "P nbytes"],
        key: Float[Tensor, "m H D"],
        value: Float[Tensor, "m H Dv"],
        step: Step,
    ) -> None:
        """Encode new tokens and write them to their pages."""
        blocks, new = step.blocks, len(step.page) // step.blocks.heads
        fresh = (x[:new].flatten(0, 1) for x in (key, value))
        blocks.kernels.place(pages, blocks.layout, step.page, step.slot, *fresh)
