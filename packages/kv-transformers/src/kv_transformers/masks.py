"""Compare the 2D mask of a pass with the stored columns of a cache."""

from dataclasses import dataclass, replace
from typing import Final

import torch
from jaxtyping import Bool
from torch import Tensor

_GIVEN: Final = "attention_mask"
_NONE: Final = "the absence of an attention_mask"
_EARLIER: Final = "the attention_mask of an earlier step"


@dataclass(frozen=True)
class MaskCheck:
    """The comparison of 2D masks with the stored columns, from pass to pass.

    A mask that hides stored columns, or shows padding, cannot be applied: stored tokens have been
    counted, scored and maybe evicted. On a CPU, and in passes of several columns, it raises at
    once. A decode step on a GPU does not wait for the comparison: the next pass reads the result.

    Attributes:
        waits: whether decode steps wait for the comparison, as on a CPU.
        masked: whether a pass had a mask; without any, every stored column holds a token.
        late: whether the mask of a decode step differed; a host tensor, filled asynchronously.
    """

    waits: bool
    masked: bool = False
    late: Bool[Tensor, ""] | None = None

    def after(
        self, mask: Bool[Tensor, "B T"] | None, held: Bool[Tensor, "B2 T2"] | None, fresh: int
    ) -> "MaskCheck":
        """Compare a pass's mask with the stored columns; return the check for the next pass.

        Args:
            mask: which stored and fresh columns hold a token; None: all do.
            held: which stored columns hold a token; None: no columns are stored.
            fresh: number of columns of the pass.

        Raises:
            ValueError: the mask differs, in this pass or in an earlier decode step.
        """
        if held is None:
            return MaskCheck(self.waits, mask is not None)
        if self.late is not None and bool(self.late):  # on the host, so no synchronization
            raise ValueError(_refusal(_EARLIER))
        if mask is None and not self.masked:
            return self
        shown = torch.ones_like(held) if mask is None else mask[:, : held.shape[1]]
        differs, late = (shown != held).any(), self.late
        if not self.waits and fresh == 1:
            late = torch.zeros((), dtype=torch.bool, pin_memory=differs.is_cuda)
            late.copy_(differs, non_blocking=True)
        elif bool(differs):
            raise ValueError(_refusal(_NONE if mask is None else _GIVEN))
        return replace(self, masked=True, late=late)


def _refusal(what: str) -> str:
    return (
        f"{what} hides columns whose tokens the compressed cache holds, or shows columns that were "
        "padding; pass the earlier mask with columns added on the right, or use a new cache to "
        "omit tokens"
    )
