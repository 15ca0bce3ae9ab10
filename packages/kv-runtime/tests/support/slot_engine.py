"""Steps of an engine over slots, without the engine: chunked prefill and decode of requests."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kv_policy import (
    CacheShape,
    Codec,
    HeadBasis,
    LayerBasis,
    TokenFormat,
    parse,
    tier_formats,
)
from kv_runtime.slots import Blocks, SlotLayer

HEADS, GROUP, DIM, SIZE, BLOCKS = 2, 3, 8, 4, 64
SCALE = 0.3
SHAPE = CacheShape(1, HEADS, GROUP, DIM, DIM, torch.float32)


class Given(NamedTuple):
    """What an engine gives for a step: where tokens are, and the vectors of the new ones."""

    spans: dict[int, slice]
    query: Tensor
    key: Tensor
    value: Tensor
    start: Tensor
    length: Tensor
    table: Tensor
    slots: Tensor


class Engine:
    """Requests in steps of some tokens each, over blocks in random order."""

    def __init__(
        self,
        form: TokenFormat,
        lengths: Sequence[int],
        backend: str = "torch",
        softcap: float | None = None,
        sinks: Tensor | None = None,
        unused: int = 0,
        basis: LayerBasis | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.basis, self.form = basis or LayerBasis(), form
        self.layer = SlotLayer(form, SCALE, backend, softcap, sinks, self.basis)
        self.blocks = blocks(form, backend, unused)
        self.query = [torch.randn(n, HEADS * GROUP, DIM) for n in lengths]
        self.key = [3 * torch.randn(n, HEADS, DIM) for n in lengths]
        self.value = [torch.randn(n, HEADS, DIM) for n in lengths]
        self.done = [0] * len(lengths)
        # As an engine gives it: the unused bytes are at the end of a block.
        width = HEADS * (SIZE * form.nbytes + unused)
        memory = torch.full((BLOCKS, width), 255, dtype=torch.uint8)
        used = memory[:, : HEADS * SIZE * form.nbytes]
        self.cache = used.unflatten(1, (HEADS, SIZE, form.nbytes))
        free = iter((1 + torch.randperm(BLOCKS - 1)).tolist())
        width = max(-(-n // SIZE) for n in lengths)
        self.table = torch.full((len(lengths), width), 10**6, dtype=torch.int32)
        for row, n in zip(self.table, lengths, strict=True):
            for column in range(-(-n // SIZE)):
                row[column] = next(free)

    def given(self, new: dict[int, int], padding: int = 0) -> "Given":
        """Let some requests go on by some tokens; give what an engine gives for the step."""
        spans = {r: slice(self.done[r], self.done[r] + n) for r, n in new.items()}
        q, k, v = (
            torch.cat([x[r][span] for r, span in spans.items()] + [x[0][:1]] * padding)
            for x in (self.query, self.key, self.value)
        )
        slots = [torch.full((padding,), -1)]
        for r, span in reversed(spans.items()):
            at = torch.arange(span.start, span.stop)
            slots.insert(0, self.table[r][at // SIZE].long() * SIZE + at % SIZE)
            self.done[r] = span.stop
        length = torch.tensor([span.stop for span in spans.values()])
        start = torch.tensor([0, *new.values()]).cumsum(0)
        return Given(spans, q, k, v, start, length, self.table[list(new)], torch.cat(slots))

    def step(self, new: dict[int, int], padding: int = 0) -> dict[int, tuple[Tensor, Tensor]]:
        """Let some requests go on by some tokens; give what these see and what they should."""
        given = self.given(new, padding)
        longest = int(given.length.max())
        step = self.blocks.step(given.start, given.length, longest, given.table, given.slots)
        out = torch.full_like(given.query, torch.nan)
        self.layer.forward(given.query, given.key, given.value, self.cache, step, out)
        pieces = out.split([*new.values(), padding])
        spans = given.spans.items()
        return {r: (x, self.expected(r, s)) for (r, s), x in zip(spans, pieces, strict=False)}

    def expected(self, request: int, span: slice) -> Tensor:
        """Causal attention in float64, over earlier tokens as they are stored."""
        both = (
            (self.form.key, self.key, self.basis.key),
            (self.form.value, self.value, self.basis.value),
        )
        key, value = (
            torch.cat([_seen(codec, x[request][: span.start], maps), x[request][span].double()])
            for codec, x, maps in both
        )
        key, value = (x.repeat_interleave(GROUP, dim=1) for x in (key, value))
        logits = torch.einsum("lhd,shd->hls", self.query[request][span].double(), key) * SCALE
        softcap, sinks = self.layer.softcap, self.layer.sinks
        logits = logits if softcap is None else softcap * (logits / softcap).tanh()
        later = torch.ones(logits.shape[1:], dtype=torch.bool).triu(1 + span.start)
        weights = logits.masked_fill(later, -torch.inf).softmax(-1)
        if sinks is not None:
            lse = logits.masked_fill(later, -torch.inf).logsumexp(-1)
            weights = weights * (lse - sinks.view(-1, 1)).sigmoid()[..., None]
        return torch.einsum("hls,shd->lhd", weights, value)


def _seen(codec: Codec, x: Tensor, maps: HeadBasis | None) -> Tensor:
    """Return vectors as they are stored, and mapped back to what the model computed."""
    if maps is None:
        return stored(codec, x)
    coordinates = maps.project(x.transpose(0, 1)[None])[0].transpose(0, 1)
    back = maps.undo(stored(codec, coordinates).transpose(0, 1)[None, :, None])
    found = back[0, :, 0].transpose(0, 1)
    return found if maps.shift is None else found + maps.shift.double()


def stored(codec: Codec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x.flatten(0, 1)[:, None])).view(x.shape).double()


def blocks(form: TokenFormat, backend: str = "torch", unused: int = 0) -> Blocks:
    nbytes = HEADS * (SIZE * form.nbytes + unused)
    return Blocks.of(form, HEADS, SIZE, nbytes, torch.device("cpu"), backend)


def form(name: str) -> TokenFormat:
    return tier_formats(parse(name), SHAPE)[0]
