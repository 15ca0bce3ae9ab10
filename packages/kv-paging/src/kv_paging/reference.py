"""The slow oracle of TokenStore: lists of tokens as Python bytes, one at a time, without pages."""

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from kv_paging.store import TokenStore
from kv_policy import Codec, PageLayout


class Token(NamedTuple):
    """One stored token: its encoded key and value, and what stands beside them."""

    key: bytes
    value: bytes
    score: float | None
    position: int | None


class ReferenceStore:
    """Does what TokenStore says, one stream and one token after the other.

    Streams are lists by id, in the order of slots. It has no pool, so it never runs dry; `pages`
    says how many pages its tokens would take.
    """

    def __init__(self, layout: PageLayout, layers: int, sequences: int, heads: int) -> None:
        """Start with empty streams."""
        self.layout = layout
        self.layers, self.sequences, self.heads = layers, sequences, heads
        self.tokens: dict[int, list[Token]] = {
            stream: [] for stream in range(layers * sequences * heads)
        }

    @property
    def pages(self) -> int:
        """Pages that the tokens need."""
        return sum(-(-len(tokens) // self.layout.tokens) for tokens in self.tokens.values())

    def append(
        self,
        streams: Tensor,
        key: Tensor,
        value: Tensor,
        keep: Tensor,
        score: Tensor | None = None,
        position: Tensor | None = None,
    ) -> None:
        """Put the marked tokens at the ends of their streams."""
        for s, stream in enumerate(streams.tolist()):
            for t in range(keep.shape[1]):
                if keep[s, t]:
                    self.tokens[stream].append(self._token((s, t), key, value, score, position))

    def set_scores(self, streams: Tensor, score: Tensor) -> None:
        """Give stored tokens new scores."""
        for s, stream in enumerate(streams.tolist()):
            self.tokens[stream] = [
                token._replace(score=_float32(score[s, t]))
                for t, token in enumerate(self.tokens[stream])
            ]

    def compact(self, streams: Tensor, keep: Tensor) -> int:
        """Drop the unmarked tokens; kept ones past the new end fill the holes, in order."""
        pages = self.pages
        for s, stream in enumerate(streams.tolist()):
            old = self.tokens[stream]
            kept = [bool(keep[s, t]) for t in range(len(old))]
            end = sum(kept)
            moving = [old[t] for t in range(end, len(old)) if kept[t]]
            self.tokens[stream] = [old[t] if kept[t] else moving.pop(0) for t in range(end)]
        return pages - self.pages

    def replace(
        self,
        streams: Tensor,
        slot: Tensor,
        key: Tensor,
        value: Tensor,
        score: Tensor | None = None,
        position: Tensor | None = None,
    ) -> None:
        """Overwrite one token of each stream, none where the slot is -1."""
        for s, (stream, i) in enumerate(zip(streams.tolist(), slot.tolist(), strict=True)):
            if i >= 0:
                self.tokens[stream][i] = self._token((s,), key, value, score, position)

    def remove(self, streams: Tensor, slot: Tensor) -> None:
        """Take one token out of each stream; the last one takes its slot."""
        for stream, i in zip(streams.tolist(), slot.tolist(), strict=True):
            if i >= 0:
                last = self.tokens[stream].pop()
                if i < len(self.tokens[stream]):
                    self.tokens[stream][i] = last

    def weakest(self, streams: Tensor) -> list[tuple[float, int]]:
        """Give the lowest score of each stream and its first slot."""
        found = []
        for stream in streams.tolist():
            scores = [float("inf") if t.score is None else t.score for t in self.tokens[stream]]
            low = min(scores, default=float("inf"))
            found.append((low, scores.index(low) if scores else -1))
        return found

    def select(self, source: Tensor) -> None:
        """Let the sequences become the ones named."""
        old, before, named = self.tokens, self.sequences, source.tolist()
        self.sequences = len(named)
        self.tokens = {
            (layer * self.sequences + b) * self.heads + h: list(
                old[(layer * before + named[b]) * self.heads + h]
            )
            for layer in range(self.layers)
            for b in range(self.sequences)
            for h in range(self.heads)
        }

    def clear(self, sequences: Tensor) -> None:
        """Empty the streams of sequences."""
        for stream, tokens in self.tokens.items():
            if stream // self.heads % self.sequences in sequences.tolist():
                tokens.clear()

    def truncate(self, length: Tensor) -> None:
        """Keep at most the first tokens of every head of each sequence."""
        for stream, tokens in self.tokens.items():
            del tokens[int(length[stream // self.heads % self.sequences]) :]

    def _token(
        self,
        at: tuple[int, ...],
        key: Tensor,
        value: Tensor,
        score: Tensor | None,
        position: Tensor | None,
    ) -> Token:
        return Token(
            _encode(self.layout.format.key, key[at]),
            _encode(self.layout.format.value, value[at]),
            None if score is None else _float32(score[at]),
            None if position is None else int(position[at]),
        )


def stored(store: TokenStore) -> dict[int, list[Token]]:
    """Read what a store's pages hold, byte by byte from the layout's arithmetic alone."""
    layout, tokens = store.layout, store.layout.tokens
    segments, keys = layout.segments, len(layout.format.key.parts)
    score, position = layout.score_offset, layout.position_offset
    pages = [bytes(page.tolist()) for page in store.pool.data]
    found: dict[int, list[Token]] = {}
    lengths = store.length.flatten().tolist()
    for stream, held in enumerate(store.table.flatten(0, -2).tolist()):
        found[stream] = []
        for slot in range(lengths[stream]):
            page, row = pages[held[slot // tokens]], slot % tokens
            parts = [page[at + row * width : at + (row + 1) * width] for at, _, width in segments]
            token = Token(
                b"".join(parts[:keys]),
                b"".join(parts[keys:]),
                struct.unpack_from("=f", page, score + 4 * row)[0] if layout.scores else None,
                struct.unpack_from("=i", page, position + 4 * row)[0] if layout.positions else None,
            )
            found[stream].append(token)
    return found


def _encode(codec: Codec, vector: Tensor) -> bytes:
    return bytes(codec.encode(vector[None, None])[0].tolist())


def _float32(score: Tensor) -> float:
    return float(score.to(torch.float32))
