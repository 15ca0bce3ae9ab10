"""The device that kernels are launched on."""

from unittest.mock import MagicMock, patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kv_policy.launching import UNIT, base_of, launching_on


def test_kernels_are_launched_on_the_device_of_a_tensor() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, device="cuda:1")
    guard = MagicMock()
    with patch("torch.cuda.device", guard), launching_on(x):
        guard.assert_called_once_with(torch.device("cuda", 1))
        guard.return_value.__enter__.assert_called_once_with()
        guard.return_value.__exit__.assert_not_called()
    guard.return_value.__exit__.assert_called_once()


def test_a_cpu_has_no_current_device() -> None:
    with patch("torch.cuda.device", side_effect=AssertionError), launching_on(torch.empty(2)):
        pass


def test_any_slice_is_an_aligned_storage_and_an_offset() -> None:
    x = torch.arange(24, dtype=torch.int32).view(4, 6)
    for part in (x, x[1:], x[2, 3:], x.T[1]):
        base, offset = base_of(part)
        assert base.data_ptr() == x.data_ptr()
        assert offset % UNIT == 0
        where = torch.as_strided(base, part.shape, part.stride(), offset // UNIT)
        assert torch.equal(where, part)
