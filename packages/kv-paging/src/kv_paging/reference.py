"""A slow reference of TokenStore: lists of tokens as Python bytes, one at a time, without pages."""

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from kv_paging.store import TokenStore
from kv_policy import Codec, PageLayout


class Token(NamedTuple):
    """One stored token: its encoded key and value, score and position."""

    key: bytes
    value: bytes
    score: float | None
    position: int | None


class ReferenceStore:
    """The semantics of TokenStore, one table row and one token at a time.

    Table rows are lists by id, in the order of slots. There is no pool, so it is never exhausted;
    `pages` computes the number of pages for its tokens.
    """

    def __init__(self, layout: PageLayout, layers: int, sequences: int, heads: int) -> None:
        """Create empty table rows."""
        self.layout = layout
        self.layers, self.sequences, self.heads = layers, sequences, heads
        self.tokens: dict[int, list[Token]] = {
            table_row: [] for table_row in range(layers * sequences * heads)
        }

    @property
    def pages(self) -> int:
        """Number of pages required by the tokens."""
        return sum(-(-len(tokens) // self.layout.tokens) for tokens in self.tokens.values())

    def append(
        self,
        table_rows: Tensor,
        key: Tensor,
        value: Tensor,
        keep: Tensor,
        score: Tensor | None = None,
        position: Tensor | None = None,
    ) -> None:
        """Append the marked tokens to their table rows."""
        for s, table_row in enumerate(table_rows.tolist()):
            for t in range(keep.shape[1]):
                if keep[s, t]:
                    self.tokens[table_row].append(self._token((s, t), key, value, score, position))

    def set_scores(self, table_rows: Tensor, score: Tensor) -> None:
        """Set the scores of stored tokens."""
        for s, table_row in enumerate(table_rows.tolist()):
            self.tokens[table_row] = [
                token._replace(score=_float32(score[s, t]))
                for t, token in enumerate(self.tokens[table_row])
            ]

    def compact(self, table_rows: Tensor, keep: Tensor) -> int:
        """Evict the unmarked tokens; kept ones past the new end fill the holes, in order."""
        pages = self.pages
        for s, table_row in enumerate(table_rows.tolist()):
            old = self.tokens[table_row]
            kept = [bool(keep[s, t]) for t in range(len(old))]
            end = sum(kept)
            moving = [old[t] for t in range(end, len(old)) if kept[t]]
            self.tokens[table_row] = [old[t] if kept[t] else moving.pop(0) for t in range(end)]
        return pages - self.pages

    def replace(
        self,
        table_rows: Tensor,
        slot: Tensor,
        key: Tensor,
        value: Tensor,
        score: Tensor | None = None,
        position: Tensor | None = None,
    ) -> None:
        """Overwrite one token of each table row; none if the slot is -1."""
        for s, (table_row, i) in enumerate(zip(table_rows.tolist(), slot.tolist(), strict=True)):
            if i >= 0:
                self.tokens[table_row][i] = self._token((s,), key, value, score, position)

    def remove(self, table_rows: Tensor, slot: Tensor) -> None:
        """Evict one token of each table row; the last one moves to its slot."""
        for table_row, i in zip(table_rows.tolist(), slot.tolist(), strict=True):
            if i >= 0:
                last = self.tokens[table_row].pop()
                if i < len(self.tokens[table_row]):
                    self.tokens[table_row][i] = last

    def weakest(self, table_rows: Tensor) -> list[tuple[float, int]]:
        """Return the lowest score of each table row and its first slot."""
        found = []
        for table_row in table_rows.tolist():
            scores = [float("inf") if t.score is None else t.score for t in self.tokens[table_row]]
            low = min(scores, default=float("inf"))
            found.append((low, scores.index(low) if scores else -1))
        return found

    def select(self, source: Tensor) -> None:
        """Replace the sequences by the ones named."""
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
        """Empty the table rows of sequences."""
        for table_row, tokens in self.tokens.items():
            if table_row // self.heads % self.sequences in sequences.tolist():
                tokens.clear()

    def truncate(self, length: Tensor) -> None:
        """Keep at most the first tokens of every head of each sequence."""
        for table_row, tokens in self.tokens.items():
            del tokens[int(length[table_row // self.heads % self.sequences]) :]

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
    """Read the tokens in a store's pages, byte by byte from the layout's offsets alone."""
    layout, tokens = store.layout, store.layout.tokens
    segments, keys = layout.segments, len(layout.format.key.parts)
    score, position = layout.score_offset, layout.position_offset
    pages = [bytes(page.tolist()) for page in store.pool.data]
    found: dict[int, list[Token]] = {}
    lengths = store.length.flatten().tolist()
    for table_row, held in enumerate(store.table.flatten(0, -2).tolist()):
        found[table_row] = []
        for slot in range(lengths[table_row]):
            page, row = pages[held[slot // tokens]], slot % tokens
            parts = [page[at + row * width : at + (row + 1) * width] for at, _, width in segments]
            token = Token(
                b"".join(parts[:keys]),
                b"".join(parts[keys:]),
                struct.unpack_from("=f", page, score + 4 * row)[0] if layout.scores else None,
                struct.unpack_from("=i", page, position + 4 * row)[0] if layout.positions else None,
            )
            found[table_row].append(token)
    return found


def _encode(codec: Codec, vector: Tensor) -> bytes:
    return bytes(codec.encode(vector[None, None])[0].tolist())


def _float32(score: Tensor) -> float:
    return float(score.to(torch.float32))
