"""Which implementation of attention serves a cache, and saying so where a faster one cannot."""

import logging
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from kv_attention import all_backends, check_backend, choose_backend, load_backend
from kv_policy.installing import checkout_of, install_command

AUTO: Final = "auto"
COMPILED: Final = ", which compiles it: that takes a C++20 compiler"

log = logging.getLogger("kv_runtime")


@dataclass(frozen=True, slots=True)
class Serving:
    """What attends: a backend, and the instruction set of its native code, if it has any."""

    backend: str
    instructions: str | None = None

    def __str__(self) -> str:
        """As a report writes it."""
        return self.backend if self.instructions is None else f"{self.backend} {self.instructions}"


def backend_for(device: torch.device | str, name: str = AUTO) -> str:
    """Give the name of the backend that serves a device.

    With `auto` this is the fastest that can be used. Where a faster one cannot, the logger
    `kv_runtime` says once why not, and what to do.

    Raises:
        ValueError: another name, of a backend that there is not or that cannot be used here.
    """
    if name != AUTO:
        check_backend(name, device)
        return name
    choice = choose_backend(device)
    for faster, reason in choice.passed_over.items():
        _say(choice.name, faster, reason)
    return choice.name


def expect_known(name: str) -> None:
    """Refuse a name that cannot be used here on any device.

    Raises:
        ValueError: as `backend_for`.
    """
    if name != AUTO:
        load_backend(name)


def serving(device: torch.device | str, name: str = AUTO) -> Serving:
    """Say what attends on a device under that name.

    Raises:
        ValueError: as `backend_for`.
    """
    backend = backend_for(device, name)
    found = all_backends()[backend].instructions()
    return Serving(backend, None if found is None else found.chosen)


def remedy(name: str) -> str:
    """Say what to do about a backend that cannot be used."""
    backend = all_backends()[name]
    if not backend.installed:
        compiled = checkout_of(backend.distribution) is not None  # a wheel has been
        return f"`{install_command(backend.distribution)}`" + (COMPILED if compiled else "")
    return "`kv-serve doctor` says what is wrong"


@cache
def _say(used: str, faster: str, reason: str) -> None:
    log.warning(
        "attention runs by the backend %r; %r would be faster and cannot be used: %s (%s)",
        used,
        faster,
        reason,
        remedy(faster),
    )
