"""A decode step never synchronizes with the device."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kv_attention import DenseTokens
from kv_policy import Observe

WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "item"}


class NoWait(TorchDispatchMode):
    """Raises for operations that read from the device, and for indexing by masks."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        by_mask = name.startswith("index") and any(
            isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8)
            for i in (args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ())
        )
        if name in WAITS or by_mask:
            raise AssertionError(f"{name} makes the host wait")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("group", ["mean", "max", "max-of-sums"])
@pytest.mark.parametrize("last", [0, 1, None])
@pytest.mark.parametrize("holes", [False, True])
def test_a_decode_step(case, last, group, holes):
    tiers = [("8", "4"), ("4", "2"), ("float32", "float32")]
    c = case(3, B=3, L=1, G=3, D=8, Dv=8, tiers=tiers, window=5, known=True, holes=holes)
    observe = Observe(last, group, skip=1, generated=True)
    with NoWait():
        found = c.attend(observe)
    assert torch.equal(found.out, c.attend(observe).out)


def test_what_is_not_known_is_asked(case):
    c = case(3, L=1, known=False)
    with NoWait(), pytest.raises(AssertionError, match="makes the host wait"):
        c.attend()
    c = case(3, L=1, known=True)
    c.dense[0] = DenseTokens(c.dense[0].key, c.dense[0].value, c.dense[0].position)
    with NoWait(), pytest.raises(AssertionError, match="makes the host wait"):
        c.attend()
