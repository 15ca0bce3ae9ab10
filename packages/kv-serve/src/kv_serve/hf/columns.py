"""Which columns of a batch held tokens when a cache stored them, to compare later masks with."""

from dataclasses import dataclass, replace
from typing import Final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

_GIVEN: Final = "attention_mask"
_NONE: Final = "the absence of an attention_mask"
_EARLIER: Final = "the attention_mask of a step before"


@dataclass(frozen=True)
class SeenColumns:
    """The 2D mask of the passes so far.

    A mask that hides stored columns, or shows padding, cannot be heeded: what is stored has been
    counted, scored and maybe dropped. On a CPU, and in passes of several columns, it is refused at
    once. A decode step on a GPU does not wait for the answer: a later pass reads it.

    Attributes:
        waits: for the comparison of a decode step, as on a CPU.
        mask: of the columns seen; None if every one held a token.
        late: whether the mask of a decode step differed, on the host, once the device knows.
    """

    waits: bool
    mask: Bool[Tensor, "B T"] | None = None
    late: Bool[Tensor, ""] | None = None

    def after(self, mask: Bool[Tensor, "B T"] | None, columns: int, fresh: int) -> "SeenColumns":
        """Compare a pass's mask with what was seen, and remember it.

        Args:
            mask: over the columns seen and the fresh ones; None: all hold tokens.
            columns: how many were seen, and are still held.
            fresh: how many the pass brings.

        Raises:
            ValueError: the mask differs, now or in a decode step before.
        """
        if self.late is not None and bool(self.late):  # on the host, so nothing waits
            raise ValueError(_refusal(_EARLIER))
        before = None if self.mask is None else self.mask[:, :columns]
        if not columns:
            return replace(self, mask=None if mask is None else mask.clone())
        if mask is None and before is None:
            return self
        differs, late = _differ(mask, before, columns), self.late
        if not self.waits and fresh == 1:
            late = torch.zeros((), dtype=torch.bool, pin_memory=differs.is_cuda)
            late.copy_(differs, non_blocking=True)
        elif bool(differs):
            raise ValueError(_refusal(_NONE if mask is None else _GIVEN))
        if mask is None:
            assert before is not None
            return replace(self, mask=_shown(before, columns + fresh), late=late)
        return replace(self, mask=mask.clone(), late=late)  # the caller may write into its own

    def selected(self, source: Int[Tensor, " B2"]) -> "SeenColumns":
        """Let sequences be source[0], source[1], ..."""
        if self.mask is None or len(self.mask) == 1:  # that of one row goes for all
            return self
        return replace(self, mask=self.mask[source.to(self.mask.device)])


def _differ(
    mask: Bool[Tensor, "B T"] | None, before: Bool[Tensor, "B2 T2"] | None, columns: int
) -> Bool[Tensor, ""]:
    """Whether two masks differ in the columns that were seen; None shows them all."""
    if mask is None:
        assert before is not None
        return ~before.all()
    now = mask[:, :columns]
    return ~now.all() if before is None else (now != _shown(before, columns)).any()


def _shown(mask: Bool[Tensor, "B T"], columns: int) -> Bool[Tensor, "B T2"]:
    """The mask of so many columns, of which the later ones hold tokens."""
    return torch.nn.functional.pad(mask, (0, columns - mask.shape[1]), value=True)


def _refusal(what: str) -> str:
    return (
        f"{what} hides columns whose tokens the compressed cache holds, or shows columns that were "
        "padding; give the mask of the passes before with columns added on the right, or leave "
        "tokens out with a new cache"
    )
