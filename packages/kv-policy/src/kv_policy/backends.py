"""Backends: implementations of attention and page kernels that packages register by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint
from types import MappingProxyType
from typing import Any, Final

from kv_policy.registry import BrokenPolicyError, claims, imported, package_of

GROUP: Final = "kv_policy.backends"  # the entry point group that packages register backends in


@dataclass(frozen=True, slots=True)
class Instructions:
    """The instruction sets of a backend's native code, the fastest last.

    Attributes:
        compiled: those that the code was compiled for.
        runnable: those of them that this processor supports.
        chosen: the one in use.
        forced: the assignment of an environment variable that chose, such as `KV_CPU_ISA=avx2`;
            None if the fastest runnable one was chosen.
    """

    compiled: tuple[str, ...]
    runnable: tuple[str, ...]
    chosen: str
    forced: str | None


@dataclass(frozen=True, slots=True)
class Backend:
    """An implementation of attention, and the page kernels that belong to it.

    Attributes:
        name: what it is selected by.
        about: one line that describes it.
        load: returns the function that attends, as `kv_attention.backends.Attend` declares it.
        missing: returns why it cannot be used on this machine, or None if it can.
        devices: the device types it supports; empty for all.
        instructions: returns the instruction sets of its native code; None where it has none.
        page_kernels: the module whose functions implement `kv_paging.PageKernels`, with `missing`
            and `declined`; None if torch writes its pages.
        token_scores: the module whose functions implement `kv_evict.gate_kernels.GateKernels`;
            None if torch computes these scores.
        partial: returns the function that attends to some of the tokens, as
            `kv_attention.backends.AttendPartly` declares it; None if torch does this.
        decode_rows: returns the function that decodes on an engine's own tensors, as
            `kv_attention.rows.DecodeRows` declares it; None if there is none.
        select_pages: returns the function that selects the pages that a decode step reads, as
            `kv_attention.reading.SelectPages` declares it; None if torch does this.
        preferred: whether it is chosen before torch on its devices.
        self_checked: whether a cache that chooses it by itself compares it with torch first.
        environment: the environment variables it reads.
        installed: whether a package registers it.
        distribution: the distribution it belongs to, filled in from its registration.
    """

    name: str
    about: str
    load: Callable[[], Any]
    missing: Callable[[], str | None] = lambda: None
    devices: tuple[str, ...] = ()
    instructions: Callable[[], Instructions | None] = lambda: None
    page_kernels: str | None = None
    token_scores: str | None = None
    partial: Callable[[], Any] = lambda: None
    decode_rows: Callable[[], Any] = lambda: None
    select_pages: Callable[[], Any] = lambda: None
    preferred: bool = False
    self_checked: bool = False
    environment: tuple[str, ...] = ()
    installed: bool = True
    distribution: str = ""

    def supports(self, device_type: str) -> bool:
        """Return whether it supports tensors on devices of a type, such as `cpu` or `cuda`."""
        return not self.devices or device_type in self.devices


# Backends that are distributed separately: what to install where nothing registers the name.
SEPARATE: Final = (
    Backend(
        "cpu",
        "native code for decode steps, prompts and scores on a CPU, torch for the rest",
        lambda: None,
        devices=("cpu",),
        preferred=True,
        installed=False,
        distribution="kv-cpu",
    ),
)


@cache
def installed_backends() -> Mapping[str, Backend]:
    """Return the backends that installed packages register, and those of SEPARATE, by name.

    A name that two packages claim, whose package cannot be imported, or that is registered for
    something else than a Backend of that name is `missing`, with a sentence that says why. It
    stays `preferred`, on the devices that SEPARATE has for it or else on all, so that whoever
    falls back to another backend can say so.
    """
    known = {each.name: each for each in SEPARATE}
    found = {name: _absent(each) for name, each in known.items()}
    for name, entries in claims(GROUP).items():
        found[name] = _registered(known.get(name, _unknown(name)), entries)
    return MappingProxyType(found)


def _registered(known: Backend, entries: tuple[EntryPoint, ...]) -> Backend:
    """Load the backend of a name; `known` is what is known of it if it cannot be loaded."""
    name, entry = known.name, entries[0]
    what = f"the backend {name!r}"
    try:
        backend = imported(what, entries)
        if isinstance(backend, Backend) and backend.name == name:
            return replace(backend, installed=True, distribution=package_of(entry))
        reason = (
            f"{what} of {package_of(entry)} cannot be used: {entry.value} is no Backend of that "
            f"name; register a kv_policy.Backend with name={name!r}"
        )
    except BrokenPolicyError as error:
        reason = str(error)
    return replace(
        known,
        about="cannot be loaded",
        missing=lambda: reason,
        installed=True,
        distribution=package_of(entry),
    )


def _unknown(name: str) -> Backend:
    # Whether it would have been chosen is unknown; without `preferred` nothing would name it.
    return Backend(name, "cannot be loaded", lambda: None, preferred=True)


def _absent(known: Backend) -> Backend:
    reason = f"the package {known.distribution} is not installed"
    return replace(known, missing=lambda: reason)
