"""Which columns of a batch held tokens when a cache stored them, to compare later masks with."""

from typing import Final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

_GIVEN: Final = "attention_mask"
_NONE: Final = "the absence of an attention_mask"
_EARLIER: Final = "the attention_mask of a step before"


class SeenColumns:
    """The 2D mask of the passes so far.

    A mask that hides stored columns, or shows padding, cannot be heeded: what is stored has been
    counted, scored and maybe dropped. On a CPU, and in passes of several columns, it is refused at
    once. A decode step on a GPU does not wait for the answer: a later pass reads it.
    """

    def __init__(self, device: torch.device | str) -> None:
        """Have seen nothing; a mask's comparison is waited for on a CPU."""
        self.waits = torch.device(device).type == "cpu"
        self._mask: Bool[Tensor, "B T"] | None = None  # None: every column held a token
        self._late: Bool[Tensor, ""] | None = None  # whether an earlier mask differed, on the host

    def take(self, mask: Bool[Tensor, "B T"] | None, columns: int, fresh: int) -> None:
        """Compare a pass's mask with what was seen, and remember it.

        Args:
            mask: over the columns seen and the fresh ones; None: all hold tokens.
            columns: how many were seen, and are still held.
            fresh: how many the pass brings.

        Raises:
            ValueError: the mask differs, now or in a decode step before; nothing is stored of this
                pass.
        """
        if self._late is not None and bool(self._late):
            raise ValueError(_refusal(_EARLIER))
        before = None if self._mask is None else self._mask[:, :columns]
        if columns and not (mask is None and before is None):
            differs = _differ(mask, before, columns)
            if self.waits or fresh > 1:
                if bool(differs):
                    raise ValueError(_refusal(_GIVEN if mask is not None else _NONE))
            else:
                self._late = self._pinned(differs) if self._late is None else self._late
                self._late.copy_(differs, non_blocking=True)
        if mask is not None:
            self._mask = mask.clone()  # the caller may write into the one it gave
        elif before is not None:
            more = before.new_ones(len(before), fresh)
            self._mask = torch.cat((before, more), 1)
        else:
            self._mask = None

    def select(self, source: Int[Tensor, " B2"]) -> None:
        """Let sequences become source[0], source[1], ..."""
        if self._mask is not None and len(self._mask) > 1:
            self._mask = self._mask[source.to(self._mask.device)]

    @staticmethod
    def _pinned(like: Tensor) -> Tensor:
        return torch.zeros((), dtype=torch.bool, pin_memory=like.is_cuda)


def _differ(
    mask: Bool[Tensor, "B T"] | None, before: Bool[Tensor, "B2 T2"] | None, columns: int
) -> Bool[Tensor, ""]:
    """Whether two masks differ in the columns that were seen; None shows them all."""
    if mask is None:
        assert before is not None
        return ~before.all()
    now = mask[:, :columns]
    if before is None:
        return ~now.all()
    shown = torch.nn.functional.pad(before, (0, columns - before.shape[1]), value=True)
    return (now != shown).any()


def _refusal(what: str) -> str:
    return (
        f"{what} hides columns whose tokens the compressed cache holds, or shows columns that were "
        "padding; give the mask of the passes before with columns added on the right, or leave "
        "tokens out with a new cache"
    )
