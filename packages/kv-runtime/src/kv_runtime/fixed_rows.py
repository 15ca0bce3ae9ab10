"""The tokens of decoding requests at fixed addresses, so that a step can be captured once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_attention import AttentionInputs, DenseTokens, can_capture
from kv_paging import can_capture_pages, page_kernels_of
from kv_policy import KVPolicy, PagedTokens, complete
from kv_runtime.cache import PolicyCache
from kv_runtime.copies import to_device
from kv_runtime.layout import Layout


@dataclass(slots=True)
class FixedRows:
    """The tokens of a step in which requests decode, and which sequences of a cache they are of.

    The cache has fixed memory (`PolicyCache.fix`). What a step launches depends on the number of
    tokens alone: a token of no request is padding, which is not stored, and its output is 0.

    Attributes:
        cache: the cache.
        both: the row of each sequence's token, then the sequence of each row; -1: none.
        filled: the numbers in `both`, as the host has filled them.
    """

    cache: PolicyCache
    both: Int[Tensor, " indices"]
    filled: list[int]
    _source: Int[Tensor, " B"] | None = None  # of the pass
    _into: Int[Tensor, " B"] | None = None  # of the pass

    @classmethod
    def of(cls, cache: PolicyCache, sequences: int) -> "FixedRows":
        """Allocate the indices of a cache's sequences, and of as many rows; all are padding."""
        both = torch.full((2 * sequences,), -1, dtype=torch.long, device=cache.device)
        return cls(cache, both, [-1] * (2 * sequences))

    @property
    def row(self) -> Int[Tensor, " B"]:
        """The row of each sequence's token; -1: none."""
        return self.both[: len(self.both) // 2]

    @property
    def target(self) -> Int[Tensor, " n"]:
        """The rows of the step's tokens."""
        rows = [row for row in self.filled[: len(self.filled) // 2] if row >= 0]
        return torch.tensor(rows, dtype=torch.long)

    def fill(self, row: Sequence[int]) -> None:
        """Set the row of each sequence's token, -1 for none; the host does not wait.

        Rows past those of the fixed memory are of a step that is not captured.
        """
        count = len(row)
        sequence = [-1] * count
        for i, each in enumerate(row):
            if 0 <= each < count:
                sequence[each] = i
        if self.filled != (filled := [*row, *sequence]):
            self.filled = filled
            self.both.copy_(to_device(torch.tensor(filled), self.both.device))

    def begin(self) -> None:
        """Begin the forward pass of the step."""
        row, sequence = self.both.chunk(2)
        self._source, self._into = row.clamp(min=0), sequence.clamp(min=0)
        self.cache.begin((row >= 0)[:, None], prompt=False, counted=False)

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "m Q D"],
        key: Float[Tensor, "m H D"],
        value: Float[Tensor, "m H Dv"],
        scale: float,
        output: Float[Tensor, "m Q Dv"],
        softcap: float | None = None,
        sinks: Float[Tensor, " Q"] | None = None,
        *,
        more: bool = False,
    ) -> None:
        """Attend, store, and write all rows of `output`, as `TokenRows.attend`."""
        assert self._source is not None, "begin was called"
        assert self._into is not None, "begin was called"
        heads, source = key.shape[1], self._source
        q, k, v = (x.index_select(0, source)[:, None] for x in (query, key, value))
        grouped = q.unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)
        by_head = None if sinks is None else sinks.view(heads, -1)
        found = self.cache.attend(
            layer,
            grouped,
            k.transpose(1, 2),
            v.transpose(1, 2),
            scale,
            softcap,
            by_head,
            more=more,
        )
        tokens = len(query)
        mine = found[:, :, :, 0].flatten(1, 2).index_select(0, self._into[:tokens])
        padding = self.both[len(source) :][:tokens] < 0
        output.copy_(mine.masked_fill(padding[:, None, None], 0))


def captures_pages(
    policy: KVPolicy,
    layout: Layout,
    backend: str,
    device: torch.device,
    softcap: float | None = None,
    sinks: Float[Tensor, " Q"] | None = None,
) -> bool:
    """Return whether a layer's decode steps under a policy with pages can be captured.

    That is so where kernels for GPUs compute them, whose launches depend on the number of requests
    alone, and where the policy observes no generated query, whose attention is summed in memory as
    long as the longest request, and decides on the device. Formats that encode several tokens
    together synchronize. A policy that reads some pages is not captured: a layer is left out where
    the host knows that it reads all, and the columns of tables are as many as are read.

    Args:
        policy: the policy.
        layout: its pages.
        backend: the backend of attention and pages.
        device: the device.
        softcap: the bound of the layer's logits.
        sinks: a logit of each query head.
    """
    if policy.reading is not None:
        return False
    selector = None if policy.selector is None else complete(policy.selector)
    if selector is not None and (selector.observe.generated or not selector.decodes_on_device):
        return False
    name = page_kernels_of(backend)
    for kind, shape in enumerate(layout.shapes):
        pages = [*layout.pages[kind], *([layout.window_layout(kind)] if layout.window else [])]
        if any(each.format.block > 1 for each in pages):
            return False
        if not all(can_capture_pages(name, each, device) for each in pages):
            return False
        lead = 1, shape.kv_heads
        key, value = (
            torch.zeros(*lead, 1, dim, dtype=shape.dtype, device=device)
            for dim in (shape.key_dim, shape.value_dim)
        )
        number = torch.zeros(*lead, 1, dtype=torch.int32, device=device)
        position = number[:, 0].long()
        data = torch.zeros(1, layout.page_bytes, dtype=torch.uint8, device=device)
        parts = tuple(PagedTokens(data, number, number[..., 0], each, longest=0) for each in pages)
        inputs = AttentionInputs(
            key[:, :, None].expand(-1, -1, shape.group, -1, -1),
            position,
            parts,
            (DenseTokens(key, value, position),),
            (None,) * len(parts),
            shape.value_dim,
            1.0,
            softcap=softcap,
            sinks=sinks,
        )
        if not can_capture(backend, inputs):
            return False
    return True


def fixed_bytes(layout: Layout, requests: int, tokens: int) -> tuple[int, int]:
    """Return the bytes of fixed memory for requests, and of what a captured step keeps.

    The first is that of page tables: four bytes for each page that each head of each request may
    hold. The second is that of the new tokens of all layers.

    Args:
        layout: the pages.
        requests: the most requests.
        tokens: the most tokens of a request.
    """
    columns = vectors = 0
    for kind, tiers in enumerate(layout.pages):
        heads = sum(layer.count(kind) for layer in layout.kind)
        least = [min(page.tokens for page in tiers[i : i + 2]) for i in range(0, len(tiers), 2)]
        columns += heads * (sum(-(-tokens // n) + 1 for n in least) + layout.window_pages(kind))
        shape = layout.shape
        vectors += heads * (shape.key_dim + shape.value_dim) * shape.dtype.itemsize
    return 4 * requests * columns, requests * vectors
