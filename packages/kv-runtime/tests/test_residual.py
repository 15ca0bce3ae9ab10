"""A decode step of the cache queues its work and reads nothing back."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kv_runtime.cache import PolicyCache
from tiered_policies import POLICIES, SHAPE, Exact


class NoWait(TorchDispatchMode):
    """Refuses operations for which the host waits for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        if name in {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select"}:
            raise AssertionError(f"{name} makes the host wait")
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self._reads = pytest.MonkeyPatch()
        for name in ("tolist", "numpy", "cpu"):  # on a CPU these never come to the dispatcher
            self._reads.setattr(Tensor, name, self._refuse)
        return super().__enter__()

    def __exit__(self, *raised):
        self._reads.undo()
        return super().__exit__(*raised)

    @staticmethod
    def _refuse(*_):
        raise AssertionError("reading a tensor makes the host wait")


@pytest.mark.parametrize("name", ["leankv", "leankv-drop", "leankv-token", "keep-all"])
def test_a_decode_step_does_not_wait_for_the_device(name: str) -> None:
    policy = Exact(1, 3) if name == "keep-all" else POLICIES[name]
    cache = PolicyCache(policy, SHAPE, page_tokens=4)

    def forward(width: int) -> None:
        cache.begin(torch.ones(2, width, dtype=torch.bool))
        for layer in range(SHAPE.layers):
            query, key, value = (torch.randn(2, 2, width, d) for d in (6, 6, 5))
            cache.attend(layer, query[:, :, None], key, value, 0.4)

    forward(30)
    forward(1)  # the pool grows, and promises pages for the next steps
    cache.batch.pool.reserve(200)
    forward(1)
    with NoWait():
        forward(1)
    with NoWait(), pytest.raises(AssertionError, match="makes the host wait"):
        cache.memory()
