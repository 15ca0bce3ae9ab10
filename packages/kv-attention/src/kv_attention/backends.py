"""The implementations of attention, by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Final, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_attention import reference, torch_backend
from kv_attention.gpu import backend as gpu
from kv_attention.tokens import Attended, DenseTokens
from kv_policy import Observe, PagedTokens, interpreter


@runtime_checkable
class Attend(Protocol):
    """What a backend does; `kv_attention.attend` has checked the arguments."""

    def __call__(
        self,
        q: Float[Tensor, "B H G L D"],
        position: Int[Tensor, "B L"],
        pages: Sequence[PagedTokens],
        dense: Sequence[DenseTokens],
        value_dim: int,
        scale: float,
        observe: Observe,
        page_positions: Sequence[Int[Tensor, "B H _"] | None],
        others: Sequence[Observe],
    ) -> Attended:
        """Attend to all parts."""
        ...


@dataclass(frozen=True, slots=True)
class Backend:
    """One implementation, and why it cannot be used on this machine, if so."""

    name: str
    about: str
    load: Callable[[], Attend]
    missing: Callable[[], str | None] = lambda: None
    devices: tuple[str, ...] = ()  # types of device that it is made for; (): any
    instructions: Callable[[], "Instructions | None"] = lambda: None


@dataclass(frozen=True, slots=True)
class Instructions:
    """The instruction sets of a backend's native code, the fastest last.

    `forced` is the assignment of an environment variable that chose, or None.
    """

    compiled: tuple[str, ...]
    runnable: tuple[str, ...]
    chosen: str
    forced: str | None


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The fastest backend that can be used for a device, and why each faster one cannot."""

    name: str
    passed_over: Mapping[str, str]


NATIVE: Final = "kv_cpu"  # a package of its own: it is built, and need not be there
FASTER: Final = ("cpu",)  # than torch, the fastest first


def _native() -> Any:
    # By name, as arrows point the other way: that package is written against this one.
    return import_module(NATIVE)


def _native_missing() -> str | None:
    if find_spec(NATIVE) is None:
        return "the package kv-cpu is not installed"
    reason: str | None = _native().missing()
    return reason


def _native_instructions() -> Instructions:
    native = _native()
    return Instructions(native.compiled(), native.runnable(), native.chosen(), native.forced())


BACKENDS: Final[Mapping[str, Backend]] = MappingProxyType(
    {
        backend.name: backend
        for backend in (
            Backend("reference", "float64, slow: the judge", lambda: reference.attend),
            Backend("torch", "plain torch in blocks, any device", lambda: torch_backend.attend),
            Backend(
                "cpu",
                "native code for decode steps, prompts and scores on a CPU, torch for the rest",
                lambda: _native().attend,
                _native_missing,
                ("cpu",),
                _native_instructions,
            ),
            Backend(
                "triton",
                "kernels for GPUs, torch for the rest; only by name, until a GPU has timed them",
                lambda: gpu.attend,
                interpreter.missing,
                ("cuda",),
            ),
        )
    }
)


def available() -> dict[str, str | None]:
    """Say of every backend why it cannot be used on this machine; None if it can."""
    return {name: backend.missing() for name, backend in BACKENDS.items()}


def choose_backend(device: torch.device | str) -> BackendChoice:
    """Choose the fastest backend that can be used here for tensors on a device.

    >>> choose_backend("meta")
    BackendChoice(name='torch', passed_over={})
    """
    kind = torch.device(device).type
    passed_over: dict[str, str] = {}
    for name in FASTER:
        if kind in BACKENDS[name].devices:
            reason = BACKENDS[name].missing()
            if reason is None:
                return BackendChoice(name, passed_over)
            passed_over[name] = reason
    return BackendChoice("torch", passed_over)


def check_backend(name: str, device: torch.device | str) -> None:
    """Refuse a backend that there is not, or that cannot be used here for a device.

    Raises:
        ValueError: the sentence says why.
    """
    load(name)
    kind, devices = torch.device(device).type, BACKENDS[name].devices
    if devices and kind not in devices:
        raise ValueError(
            f"backend {name!r} is made for tensors on {', '.join(devices)}, and these are on {kind}"
        )


def load(name: str) -> Attend:
    """Give the implementation of that name.

    Raises:
        ValueError: there is none, or it cannot be used on this machine.
    """
    if name not in BACKENDS:
        raise ValueError(f"no backend is called {name!r}; there are {', '.join(BACKENDS)}")
    reason = BACKENDS[name].missing()
    if reason is not None:
        raise ValueError(f"backend {name!r} cannot be used here: {reason}")
    return BACKENDS[name].load()
