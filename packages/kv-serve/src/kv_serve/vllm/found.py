"""Whether the installed vLLM supports policies; vLLM is not imported."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Final

from kv_policy.installing import install_command
from kv_serve.problem import Problem
from kv_serve.vllm.versions import SERVED, installed, is_served

GROUP: Final = "vllm.general_plugins"  # vLLM's entry-point group of plugins
NAME: Final = "kv_serve"  # of ours
CHOSEN: Final = "VLLM_PLUGINS"  # names the plugins to load; if unset, vLLM loads all


@dataclass(frozen=True, slots=True)
class FoundVllm:
    """An installed vLLM, whether its version supports policies, and whether it finds our plugin."""

    version: str
    served: bool
    plugin: bool


def vllm_found() -> FoundVllm | None:
    """Return the installed vLLM; None if it is not installed."""
    version = installed()
    if version is None:
        return None
    return FoundVllm(version, is_served(version), bool(entry_points(group=GROUP, name=NAME)))


def vllm_problems(found: FoundVllm | None) -> Iterator[Problem]:
    """Yield the reasons why this vLLM cannot serve policies."""
    if found is None:
        return
    if not found.served:
        yield Problem(
            f"policies need {SERVED}, but vLLM {found.version} is installed",
            "install one of those to serve policies; without a policy this vLLM works",
            broken=False,
        )
    if not found.plugin:
        yield Problem(
            f"vLLM does not find kv-serve: nothing has the entry point {NAME} in {GROUP}, so a "
            "kv_policy would have no effect",
            f"`{install_command('kv-serve', deps=False, again=True)}`",
        )
    chosen = os.environ.get(CHOSEN)
    if chosen is not None and NAME not in chosen.split(","):
        yield Problem(
            f"{CHOSEN} is {chosen!r}, so vLLM does not load kv-serve, and a kv_policy has no "
            "effect",
            f"unset {CHOSEN}, or add {NAME} to it",
            broken=False,
        )
