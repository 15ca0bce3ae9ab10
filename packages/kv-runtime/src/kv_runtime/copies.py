"""Copies between host and device for which the host does not wait."""

from dataclasses import dataclass

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; the host of a GPU does not wait."""
    if device.type != "cuda" or x.device.type != "cpu":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy of a tensor on its way to the host."""

    copy: Tensor  # pinned, from a GPU
    arrived: torch.Event | None  # None: it is there

    @classmethod
    def of(cls, x: Tensor) -> "HostCopy":
        """Begin to copy `x`, which must not change later unless it is on a GPU."""
        if not x.is_cuda:
            return cls(x, None)
        copy = x.to("cpu", non_blocking=True)  # into pinned memory
        arrived = torch.Event(x.device)
        arrived.record()
        return cls(copy, arrived)

    def read(self) -> Tensor:
        """Return the numbers, after waiting for what the device did until `of` was called."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.copy
