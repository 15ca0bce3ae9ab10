"""The attention backends, by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import torch

from kv_attention import reference, torch_backend
from kv_attention.gpu import backend as gpu
from kv_attention.inputs import AttentionInputs
from kv_attention.tokens import Attended
from kv_policy import Backend, installed_backends, interpreter


@runtime_checkable
class Attend(Protocol):
    """The function of a backend; `kv_attention.attend` has checked the arguments."""

    def __call__(self, inputs: AttentionInputs) -> Attended:
        """Compute attention over all parts."""
        ...


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The fastest available backend for a device, and the reason against each faster one."""

    name: str
    passed_over: Mapping[str, str]


@cache
def all_backends() -> Mapping[str, Backend]:
    """Return all backends by name: those registered by installed packages, and the built-in ones.

    A registered backend cannot replace a built-in one.
    """
    every = (
        Backend("reference", "float64, slow: the reference", lambda: reference.attend),
        Backend("torch", "plain torch in blocks, any device", lambda: torch_backend.attend),
        Backend(
            "triton",
            "kernels for GPUs, torch otherwise; only by name, as not timed on a GPU yet",
            lambda: gpu.attend,
            interpreter.missing,
            ("cuda",),
        ),
    )
    own = {each.name: each for each in every}
    return MappingProxyType({**own, **installed_backends(), **own})


def available() -> dict[str, str | None]:
    """Return, per backend, why it is unavailable on this machine; None if it is available."""
    return {name: backend.missing() for name, backend in all_backends().items()}


def choose_backend(device: torch.device | str) -> BackendChoice:
    """Choose the fastest available backend for tensors on a device.

    >>> choose_backend("meta")
    BackendChoice(name='torch', passed_over={})
    """
    kind = torch.device(device).type
    passed_over: dict[str, str] = {}
    for name, backend in all_backends().items():
        if backend.preferred and kind in backend.devices:
            reason = backend.missing()
            if reason is None:
                return BackendChoice(name, passed_over)
            passed_over[name] = reason
    return BackendChoice("torch", passed_over)


def check_backend(name: str, device: torch.device | str) -> None:
    """Raise if a backend is unknown, or unavailable for a device.

    Raises:
        ValueError: the backend is unknown or unavailable; the message has the reason.
    """
    load_backend(name)
    kind, devices = torch.device(device).type, all_backends()[name].devices
    if devices and kind not in devices:
        raise ValueError(
            f"backend {name!r} supports tensors on {', '.join(devices)}; these are on {kind}"
        )


def load_backend(name: str) -> Attend:
    """Return the backend with this name.

    Raises:
        ValueError: the backend is unknown, or unavailable on this machine.
    """
    found = all_backends()
    if name not in found:
        raise ValueError(f"unknown backend {name!r}; choose one of {', '.join(found)}")
    reason = found[name].missing()
    if reason is not None:
        raise ValueError(f"backend {name!r} cannot be used here: {reason}")
    attend: Attend = found[name].load()
    return attend
