"""A plan of KV-Compress is some operations, however many heads share it, and waits for no device.

So are the scores of ChunkKV, whose heads share chunks.

Tensors on the meta device have no numbers, so whatever would look at one there fails.
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
    """Counts what is asked of a device; a change of shape is nothing it does."""

    def __init__(self) -> None:
        """Start at nothing."""
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
    """Nobody's tokens on the meta device, with pages whose sizes are known."""
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
    """Operations of a plan of so many layers, sequences, heads and tokens."""
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
    """Operations that scores of so many sequences, heads and tokens take."""
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
    """Else the test above would see nothing."""
    with pytest.raises(Exception, match="meta"):
        view(1, 1, 1, 1).length.max().item()
