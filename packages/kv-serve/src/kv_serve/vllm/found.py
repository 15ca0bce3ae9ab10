"""Whether the vLLM that is installed would serve policies; it is not imported."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Final

from kv_policy.installing import install_command
from kv_serve.problem import Problem
from kv_serve.vllm.versions import SERVED, installed, is_served

GROUP: Final = "vllm.general_plugins"  # where vLLM looks for plugins
NAME: Final = "kv_serve"  # of ours
CHOSEN: Final = "VLLM_PLUGINS"  # names the plugins that vLLM loads; not set, it loads all


@dataclass(frozen=True, slots=True)
class FoundVllm:
    """A vLLM, whether policies are served in its version, and whether it finds our plugin."""

    version: str
    served: bool
    plugin: bool


def vllm_found() -> FoundVllm | None:
    """Look at what is installed; None where there is no vLLM."""
    version = installed()
    if version is None:
        return None
    return FoundVllm(version, is_served(version), bool(entry_points(group=GROUP, name=NAME)))


def vllm_problems(found: FoundVllm | None) -> Iterator[Problem]:
    """Say what keeps this vLLM from serving policies."""
    if found is None:
        return
    if not found.served:
        yield Problem(
            f"policies are served in {SERVED}, and this is vLLM {found.version}",
            "install one of those to serve policies; vLLM without a policy works as it is",
            broken=False,
        )
    if not found.plugin:
        yield Problem(
            f"vLLM does not find kv-serve: nothing has the entry point {NAME} in {GROUP}, so a "
            "kv_policy would change nothing",
            f"`{install_command('kv-serve', deps=False, again=True)}`",
        )
    chosen = os.environ.get(CHOSEN)
    if chosen is not None and NAME not in chosen.split(","):
        yield Problem(
            f"{CHOSEN} is {chosen!r}, so vLLM does not load kv-serve, and a kv_policy changes "
            "nothing",
            f"unset {CHOSEN}, or add {NAME} to it",
            broken=False,
        )
