"""The attention backends, by name."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import torch

from kv_attention import reading_reference, reference, torch_backend
from kv_attention.gpu import backend as gpu
from kv_attention.inputs import AttentionInputs
from kv_attention.page_bounds import SelectPages
from kv_attention.partial import Scored
from kv_attention.rows import DecodeRows
from kv_attention.tokens import Attended
from kv_policy import Backend, installed_backends, interpreter
from kv_policy.interpreter import interpreted

log = logging.getLogger("kv_attention")


@runtime_checkable
class Attend(Protocol):
    """The function of a backend; `kv_attention.attend` has checked the arguments."""

    def __call__(self, inputs: AttentionInputs) -> Attended:
        """Compute attention over all parts."""
        ...


@runtime_checkable
class AttendPartly(Protocol):
    """A backend's attention over some of the tokens; `kv_attention` has checked the arguments."""

    def __call__(self, inputs: AttentionInputs, scored: int) -> Scored | None:
        """Attend, and score the first `scored` dense parts; None: torch does it."""
        ...


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The fastest available backend for a device, and the reason against each faster one."""

    name: str
    passed_over: Mapping[str, str]


@cache
def all_backends() -> Mapping[str, Backend]:
    """Return all backends by name: those registered by installed packages, and the built-in ones.

    A registered backend with the name of a built-in one is ignored, and the logger `kv_attention`
    says so once.
    """
    every = (
        Backend(
            "reference",
            "float64, slow: the reference",
            lambda: reference.attend,
            select_pages=lambda: reading_reference.select_pages,
        ),
        Backend("torch", "plain torch in blocks, any device", lambda: torch_backend.attend),
        Backend(
            "triton",
            "kernels for GPUs, torch for passes that they do not support",
            lambda: gpu.attend,
            interpreter.missing,
            devices=("cuda",),
            select_pages=lambda: gpu.select_pages,
            preferred=True,
            self_checked=True,
        ),
    )
    own = {each.name: each for each in every}
    registered = installed_backends()
    for name in (each for each in own if each in registered):
        log.warning(
            "the backend %r that %s registers is ignored, as a built-in one has this name; "
            "register it by another name",
            name,
            registered[name].distribution,
        )
    return MappingProxyType({**own, **registered, **own})


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
        if backend.preferred and backend.supports(kind):
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
    kind, backend = torch.device(device).type, all_backends()[name]
    anywhere = interpreted() and "cuda" in backend.devices  # as Triton's interpreter runs
    if not (backend.supports(kind) or anywhere):
        devices = ", ".join(backend.devices)
        raise ValueError(f"backend {name!r} supports tensors on {devices}; these are on {kind}")


def load_backend(name: str) -> Attend:
    """Return the backend with this name.

    Raises:
        ValueError: the backend is unknown, or unavailable on this machine.
    """
    attend: Attend = _available(name).load()
    return attend


def can_capture(name: str, inputs: AttentionInputs) -> bool:
    """Return whether a decode step may be captured in a CUDA graph, to be launched again.

    The kernels for GPUs wait for nothing then, and are launched with sizes of `inputs` alone; other
    backends, and torch for what those kernels do not support, may read numbers.
    """
    return name == "triton" and not inputs.observed and gpu.declined(inputs) is None


def load_partial(name: str) -> AttendPartly | None:
    """Return how the backend with this name attends to some of the tokens; None: as torch does.

    Raises:
        ValueError: as `load_backend`.
    """
    attend: AttendPartly | None = _available(name).partial()
    return attend


def load_rows(name: str) -> DecodeRows | None:
    """Return how the backend with this name decodes on an engine's tensors; None: it does not.

    Raises:
        ValueError: as `load_backend`.
    """
    decode: DecodeRows | None = _available(name).decode_rows()
    return decode


def load_selection(name: str) -> SelectPages | None:
    """Return how the backend with this name selects the pages of a step; None: as torch does.

    Raises:
        ValueError: as `load_backend`.
    """
    select: SelectPages | None = _available(name).select_pages()
    return select


def _available(name: str) -> Backend:
    found = all_backends()
    if name not in found:
        raise ValueError(f"unknown backend {name!r}; choose one of {', '.join(found)}")
    reason = found[name].missing()
    if reason is not None:
        raise ValueError(f"backend {name!r} cannot be used here: {reason}")
    return found[name]
