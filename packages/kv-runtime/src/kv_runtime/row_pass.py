"""What the layers of a decode pass share that attends on an engine's rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jaxtyping import Float, Int
from torch import Tensor

from kv_attention import RowMemo
from kv_policy import Running
from kv_runtime.batch import Batch, LayerRows

_Copies: TypeAlias = tuple[Float[Tensor, "B H R"], Float[Tensor, "B H Rv"]]
_Fresh: TypeAlias = tuple[Float[Tensor, "B H 1 R"], Float[Tensor, "B H 1 Rv"]]


@dataclass(frozen=True, slots=True)
class RowPass:
    """Stored tokens and memory for new ones, of all layers: each layer's is a view of one tensor.

    Attributes:
        pages: a layer's stored tokens.
        places: positions of each part of them, if its pages store none and they are read.
        running: updates the scores of stored tokens during attention; None: nothing does.
        copies: memory for a layer's new keys and values, [B, H, R] and [B, H, Rv].
        fresh: the same memory as new tokens, [B, H, 1, R] and [B, H, 1, Rv].
        memo: for layers that differ in their tensors alone; None: they differ in more.
    """

    pages: Sequence[LayerRows]
    places: tuple[Int[Tensor, "B H W"] | None, ...]
    running: Running | None
    copies: Sequence[_Copies]
    fresh: Sequence[_Fresh]
    memo: RowMemo | None

    @classmethod
    def of(
        cls,
        batch: Batch,
        running: Running | None,
        key: Float[Tensor, "m H D"],
        value: Float[Tensor, "m H Dv"],
        *,
        selects: bool,
    ) -> "RowPass | None":
        """Prepare a pass with the vectors of its first layer; None: the window is not in pages.

        `selects`: whether a layer may read some of its pages, and others more.
        """
        pages = batch.layer_rows()
        if pages is None:
            return None
        shape, lead = batch.shape, (batch.shape.layers, len(batch.seen), key.shape[1])
        keys = key.new_empty(*lead, shape.key_dim)
        values = value.new_empty(*lead, shape.value_dim)
        return cls(
            pages,
            () if running is None else batch.window_positions(),
            running,
            [*zip(keys.unbind(), values.unbind(), strict=True)],
            [*zip(keys.unsqueeze(3).unbind(), values.unsqueeze(3).unbind(), strict=True)],
            None if selects or any(groups for _, groups in pages) else RowMemo(),
        )
