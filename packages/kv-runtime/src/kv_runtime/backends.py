"""Choice of a cache's attention backend, with a warning if a faster one is unavailable."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from kv_attention import all_backends, check_backend, choose_backend, load_backend
from kv_policy import CacheShape, KVPolicy
from kv_policy.installing import checkout_of, install_command
from kv_runtime.self_check import Cache, SelfCheck, failure

AUTO: Final = "auto"
COMPILED: Final = ", which compiles it; outside Linux that needs a C++20 compiler"

log = logging.getLogger("kv_runtime")


@dataclass(frozen=True, slots=True)
class Serving:
    """An attention backend, and the instruction set of its native code, if it has any."""

    backend: str
    instructions: str | None = None

    def __str__(self) -> str:
        """Format for reports."""
        return self.backend if self.instructions is None else f"{self.backend} {self.instructions}"


def backend_for(device: torch.device | str, name: str = AUTO) -> str:
    """Return the name of the backend for a device.

    With `auto` this is the fastest available one. If a faster one is unavailable, the logger
    `kv_runtime` reports the reason and the remedy once.

    Raises:
        ValueError: the backend is unknown or unavailable.
    """
    if name != AUTO:
        check_backend(name, device)
        return name
    choice = choose_backend(device)
    for faster, reason in choice.passed_over.items():
        _say(choice.name, faster, reason)
    return choice.name


def checked_backend(
    device: torch.device,
    name: str,
    policy: KVPolicy,
    shape: CacheShape,
    page_tokens: int,
    cache: Callable[..., Cache],
) -> str:
    """Return the name of the backend for a cache, after a self-check unless it is named.

    A `Backend.self_checked` that `auto` chooses is compared with torch, once for the same use in a
    process. If it fails, the logger `kv_runtime` reports how, and torch is used. `cache` creates
    caches for the self-check, as `PolicyCache` does.

    Raises:
        ValueError: as `backend_for`.
    """
    chosen = backend_for(device, name)
    if name != AUTO or not all_backends()[chosen].self_checked:
        return chosen
    reason = failure(SelfCheck(chosen, policy, shape, device, page_tokens, cache))
    if reason is None:
        return chosen
    _say("torch", chosen, f"it fails its self-check under {policy}: {reason}")
    return "torch"


def expect_known(name: str) -> None:
    """Raise if a backend is unavailable on every device.

    Raises:
        ValueError: as `backend_for`.
    """
    if name != AUTO:
        load_backend(name)


def serving(device: torch.device | str, name: str = AUTO) -> Serving:
    """Return the backend for a device, with its instruction set.

    Raises:
        ValueError: as `backend_for`.
    """
    backend = backend_for(device, name)
    found = all_backends()[backend].instructions()
    return Serving(backend, None if found is None else found.chosen)


def remedy(name: str) -> str:
    """Return the remedy for an unavailable backend."""
    backend = all_backends()[name]
    if not backend.installed:
        compiled = checkout_of(backend.distribution) is not None  # wheels are already compiled
        return f"`{install_command(backend.distribution)}`" + (COMPILED if compiled else "")
    return "run `kv-serve doctor` for details"


@cache
def _say(used: str, faster: str, reason: str) -> None:
    log.warning(
        "using the attention backend %r; %r is preferred but unavailable: %s (%s)",
        used,
        faster,
        reason,
        remedy(faster),
    )
