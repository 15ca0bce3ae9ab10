"""Which columns of a batch hold a token: to crop by columns, and to compare later masks with."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class Columns:
    """A row of flags for each sequence, False where a column was padding; appended in place."""

    def __init__(self, sequences: int, device: torch.device) -> None:
        """Start without a column."""
        self._held = torch.zeros(sequences, 0, dtype=torch.bool, device=device)
        self.count = 0

    @property
    def nbytes(self) -> int:
        """Memory."""
        return self._held.numel()

    @property
    def held(self) -> Bool[Tensor, "B T"]:
        """Whether each column of each sequence holds a token."""
        return self._held[:, : self.count]

    def append(self, held: Bool[Tensor, "B L"]) -> None:
        """Note the columns of a pass, without waiting for the device."""
        after = self.count + held.shape[1]
        if after > self._held.shape[1]:
            old, room = self._held, after + max(64, after // 8)
            self._held = old.new_zeros(len(old), room)
            self._held[:, : self.count] = old[:, : self.count]
        self._held[:, self.count : after] = held
        self.count = after

    def tokens(self, columns: int) -> Int[Tensor, " B"]:
        """Count the tokens of each sequence in the newest columns."""
        return self._held[:, self.count - columns : self.count].sum(1)

    def drop(self, columns: int) -> None:
        """Forget the newest columns."""
        self.count -= columns

    def select(self, source: Int[Tensor, " B2"]) -> None:
        """Sequences become source[0], source[1], ..."""
        self._held = self._held[source]
