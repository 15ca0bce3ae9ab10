"""A KV-Compress plan is a fixed number of operations for any number of heads, without device syncs.

The same holds for the scores of ChunkKV, whose heads share chunks.

Tensors on the meta device have no values, so any read of a value fails there.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kv_evict.chunkkv import ChunkKV
from kv_evict.kv_compress import KVCompress
from kv_policy import CacheShape, LayerView, PlanView

TIERS = 2


class Counted(TorchDispatchMode):
    """Counts device operations; shape changes are not counted."""

    def __init__(self) -> None:
        """Start at 0."""
        super().__init__()
        self.done: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        """Count one operation."""
        if not func.is_view:
            self.done[str(func)] += 1
        return func(*args, **(kwargs or {}))


def view(layers: int, batch: int, heads: int, tokens: int) -> PlanView:
    """Tokens without values on the meta device, in pages of known sizes."""
    whole, each = (
        (layers, batch, heads, tokens),
        torch.empty(batch, dtype=torch.long, device="meta"),
    )
    return PlanView(
        shape=CacheShape(layers, heads, 1, 8, 8),
        first_layer=0,
        score=torch.empty(whole, device="meta"),
        position=torch.empty(whole, dtype=torch.long, device="meta"),
        tier=torch.empty(whole, dtype=torch.uint8, device="meta"),
        length=each,
        budget=each,
        page=torch.full((TIERS, layers, heads), 16),
    )


def asked(*size: int) -> Counter[str]:
    """Return the operations of a plan for these numbers of layers, sequences, heads and tokens."""
    what = view(*size)
    with Counted() as counted:
        plan = KVCompress(rate=4).plan(what)
    assert plan.shape == size
    return counted.done


def test_a_plan_takes_no_more_operations_for_more_of_everything() -> None:
    few = asked(2, 2, 2, 20)
    assert asked(32, 16, 8, 300) == few
    assert few.total() < 80 * TIERS


def scored(batch: int, heads: int, tokens: int) -> Counter[str]:
    """Return the operations of the scores of these numbers of sequences, heads and tokens."""
    whole = torch.empty(batch, heads, tokens, device="meta")
    what = LayerView(
        layer=torch.empty(batch, dtype=torch.long, device="meta"),
        shape=CacheShape(1, heads, 1, 8, 8),
        position=whole.long(),
        fresh=whole.bool(),
        score=whole,
        length=torch.empty(batch, dtype=torch.long, device="meta"),
        mass=whole,
        seen=whole.long(),
    )
    with Counted() as counted:
        score = ChunkKV(pool=5, chunk=10).score(what)
    assert score.shape == whole.shape
    return counted.done


def test_scores_of_chunks_take_no_more_operations_for_more_of_everything() -> None:
    assert scored(16, 8, 300) == scored(2, 2, 20)


def test_what_looks_at_a_number_fails_here() -> None:
    """Check that reading a value on the meta device fails, which the other tests rely on."""
    with pytest.raises(Exception, match="meta"):
        view(1, 1, 1, 1).length.max().item()
