"""Record of the columns that hold a token, for cropping and for checks of later masks."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class Columns:
    """Flags per sequence, False where a column was padding; appended in place."""

    def __init__(self, sequences: int, device: torch.device) -> None:
        """Start without columns."""
        self._held = torch.zeros(sequences, 0, dtype=torch.bool, device=device)
        self.count = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the flags."""
        return self._held.numel()

    @property
    def held(self) -> Bool[Tensor, "B T"]:
        """Whether each column of each sequence holds a token."""
        return self._held[:, : self.count]

    def append(self, held: Bool[Tensor, "B L"]) -> None:
        """Append the columns of a pass, without synchronizing with the device."""
        after = self.count + held.shape[1]
        if after > self._held.shape[1]:
            old, room = self._held, after + max(64, after // 8)
            self._held = old.new_zeros(len(old), room)
            self._held[:, : self.count] = old[:, : self.count]
        self._held[:, self.count : after] = held
        self.count = after

    def tokens(self, columns: int) -> Int[Tensor, " B"]:
        """Count each sequence's tokens in the newest columns."""
        return self._held[:, self.count - columns : self.count].sum(1)

    def drop(self, columns: int) -> None:
        """Remove the newest columns."""
        self.count -= columns

    def select(self, source: Int[Tensor, " B2"]) -> None:
        """Reorder sequences to source[0], source[1], ..."""
        self._held = self._held[source]
