"""What the layers of a decode pass share that attends on an engine's rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_attention import Attended, RowMemo
from kv_policy import Running
from kv_runtime.batch import Batch, LayerRows, Pass
from kv_runtime.forward_pass import Forward
from kv_runtime.retain.keep_all import KeepAll
from kv_runtime.retain.selected import KeepSelected

_Copies: TypeAlias = tuple[Float[Tensor, "B H R"], Float[Tensor, "B H Rv"]]
_Fresh: TypeAlias = tuple[Float[Tensor, "B H 1 R"], Float[Tensor, "B H 1 Rv"]]


@dataclass(frozen=True, slots=True)
class RowPass:
    """Stored tokens and memory for new ones, of all layers: each layer's is a view of one tensor.

    Attributes:
        pages: a layer's stored tokens.
        places: positions of each part of them, if its pages store none and they are read.
        running: updates the scores of stored tokens during attention; None: nothing does.
        key: memory for the new keys of all layers.
        value: memory for their values.
        copies: a layer's part of both.
        fresh: the same as new tokens.
        memo: for layers that differ in their tensors alone; None: they differ in more.
        kept: of each layer, for passes with the same stored tokens' tensors; None: of this alone.
        together: whether the tokens of all layers are taken together, after the last.
        results: of the layers so far, if they are.
        source: what a later pass must be made of to be this one again; None: of none.
    """

    pages: Sequence[LayerRows]
    places: tuple[Int[Tensor, "B H W"] | None, ...]
    running: Running | None
    key: Float[Tensor, "N B H 1 R"]
    value: Float[Tensor, "N B H 1 Rv"]
    copies: Sequence[_Copies]
    fresh: Sequence[_Fresh]
    memo: RowMemo | None
    kept: Sequence[RowMemo | None]
    together: bool
    source: "_Source | None"
    results: list[Attended] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        batch: Batch,
        now: Forward,
        keeper: KeepAll | KeepSelected,
        key: Float[Tensor, "m H D"],
        value: Float[Tensor, "m H Dv"],
        before: "RowPass | None",
        *,
        selects: bool,
    ) -> "RowPass | None":
        """Prepare a pass with the vectors of its first layer.

        Args:
            batch: the stored tokens.
            now: the pass.
            keeper: takes the new ones.
            key: keys of the first layer.
            value: its values.
            before: an earlier pass, which is the result if nothing differs.
            selects: whether a layer may read some of its pages, and others more.

        Returns:
            None: it is more than a decode pass of one token a sequence, or the values of a window
                are in its keys.
        """
        whole = now.whole
        if whole.is_prefill or len(now.parts) > 1 or whole.position.shape[1] > 1:
            return None
        if whole.reach is not None:
            return None
        # A page that others hold, too, is copied before its scores are updated.
        running = None if batch.pool.shares else keeper.running
        together = keeper.takes_layers(running)
        source = None
        if together and not selects:
            source = _Source.of(batch, running, key, value)
        if before is not None and source is not None and source.same(before.source):
            before.results.clear()  # of a pass that was not finished
            return before
        pages = batch.layer_rows()
        if pages is None:
            return None
        shape, lead = batch.shape, (batch.shape.layers, len(batch.seen), key.shape[1])
        keys = key.new_empty(*lead, 1, shape.key_dim)
        values = value.new_empty(*lead, 1, shape.value_dim)
        alike = not selects and not any(groups for _, groups in pages)
        return cls(
            pages=pages,
            places=() if running is None else batch.window_positions(),
            running=running,
            key=keys,
            value=values,
            copies=[*zip(keys.squeeze(3).unbind(), values.squeeze(3).unbind(), strict=True)],
            fresh=[*zip(keys.unbind(), values.unbind(), strict=True)],
            memo=RowMemo() if alike else None,
            kept=[None if source is None else RowMemo() for _ in pages],
            together=together,
            source=source,
        )

    def take(
        self, result: Attended, keeper: KeepAll | KeepSelected, batch: Batch, now: Pass
    ) -> bool:
        """Let the new tokens of all layers be taken after the last; return whether this is it."""
        self.results.append(result)
        if len(self.results) < len(self.key):
            return False
        keeper.take_layers(batch, now, self.key, self.value, self.results)
        self.results.clear()
        return True

    def lacks(self, layer: int) -> bool:
        """Whether a layer before this one has been taken on its own."""
        return self.together and len(self.results) < layer

    def take_each(self, keeper: KeepAll | KeepSelected, batch: Batch, now: Pass) -> None:
        """Let the new tokens of the layers so far be taken, before one that is taken on its own."""
        for layer, (own, seen) in enumerate(zip(self.fresh, self.results, strict=False)):
            keeper.take(batch, now, layer, *own, seen, None, own)
        self.results.clear()


@dataclass(frozen=True, slots=True)
class _Source:
    """What a pass is made of that may be made again of the same."""

    tensors: tuple[Tensor, ...]
    kinds: tuple[object, ...]

    @classmethod
    def of(
        cls, batch: Batch, running: Running | None, key: Tensor, value: Tensor
    ) -> "_Source | None":
        tensors = batch.read_in_place
        if tensors is None:
            return None
        vectors = key.dtype, key.shape[1:], value.dtype, value.shape[1:]
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return cls(tensors, (running, *modes, *vectors))

    def same(self, other: "_Source | None") -> bool:
        return (
            other is not None
            and self.kinds == other.kinds
            and len(self.tensors) == len(other.tensors)
            and all(a is b for a, b in zip(self.tensors, other.tensors, strict=True))
        )
