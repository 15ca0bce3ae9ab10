"""Settings for the environments of this machine: package indexes, and the build of torch.

uv does not read pip's configuration, so pip's settings (an index, extra indexes, folders of wheels,
a certificate) are read from pip and passed on to uv. On a machine without a GPU a CPU build of
torch is chosen if one is available: the default build brings gigabytes of CUDA libraries.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

# pip's option, uv's variable, and its separator between values (None: a single value).
TRANSLATION: Final = (
    ("index-url", "UV_DEFAULT_INDEX", None),
    ("extra-index-url", "UV_INDEX", " "),
    ("find-links", "UV_FIND_LINKS", ","),
    ("no-index", "UV_NO_INDEX", None),
    ("trusted-host", "UV_INSECURE_HOST", " "),
    ("cert", "SSL_CERT_FILE", None),
    ("proxy", "ALL_PROXY", None),
    ("default-timeout", "UV_HTTP_TIMEOUT", None),
    ("timeout", "UV_HTTP_TIMEOUT", None),
)


@dataclass(frozen=True, slots=True)
class Torch:
    """Which build of torch to install: an exact requirement, uv's backend, or neither."""

    requirement: str | None = None
    backend: str | None = None


def pip_options(listing: str) -> dict[str, str]:
    """Parse the output of `pip config list`; as in pip, the environment overrides the files."""
    options: dict[str, str] = {}
    for section in ("global.", "install.", ":env:."):
        for line in listing.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(section):
                options[key.removeprefix(section)] = str(ast.literal_eval(value))
    return options


def configured(python: str = sys.executable) -> dict[str, str]:
    """Return pip's configuration; empty without pip."""
    command = (python, "-m", "pip", "config", "list")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return pip_options(done.stdout) if done.returncode == 0 else {}


def uv_variables(options: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Translate pip's options to uv's variables; variables already set are left unchanged."""
    variables: dict[str, str] = {}
    for option, variable, separator in TRANSLATION:
        if option in options and variable not in environ:
            value = options[option]
            variables[variable] = separator.join(value.split()) if separator else value.strip()
    if "UV_INDEX" in variables and "UV_INDEX_STRATEGY" not in environ:
        # pip compares every index and takes the best version; uv would stop at the first
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return variables


def cores() -> int:
    """Return how many processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU."""
    return shutil.which("nvidia-smi") is not None or any(Path("/dev").glob("nvidia[0-9]*"))


def links(location: str) -> Iterator[str]:
    """Yield the file names at a find-links location: a folder or a page of links."""
    scheme = urlsplit(location).scheme
    if scheme in ("http", "https"):
        try:
            with urllib.request.urlopen(location, timeout=20) as page:
                text = page.read().decode(errors="replace")
        except (urllib.error.URLError, TimeoutError):
            return
        for link in re.findall(r"href=[\"']([^\"']+)", text):
            yield unquote(urlsplit(link).path).rsplit("/", 1)[-1]
    else:
        folder = Path(url2pathname(urlsplit(location).path) if scheme == "file" else location)
        yield from (path.name for path in folder.expanduser().glob("*.whl"))


def cpu_torch(names: Iterable[str]) -> Version | None:
    """Return the newest CPU build of torch among wheels that this interpreter can install."""
    supported = frozenset(sys_tags())
    versions: list[Version] = []
    for name in names:
        try:
            project, version, _, tags = parse_wheel_filename(name)
        except InvalidWheelFilename:
            continue
        local = version.local or ""
        if project == "torch" and local.startswith("cpu") and not supported.isdisjoint(tags):
            versions.append(version)
    return max(versions, default=None)


def torch_backend_answers(uv: str, environ: Mapping[str, str]) -> bool:
    """Return whether uv reaches the torch project's own index of CPU builds."""
    command = (uv, "pip", "compile", "-", "--quiet", "--no-deps", "--torch-backend", "cpu")
    done = subprocess.run(
        command,
        input="torch",
        env={**environ, "UV_HTTP_RETRIES": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode == 0


def choose_torch(variables: Mapping[str, str], uv: str, *, gpu: bool) -> Torch:
    """Choose the build of torch: the default one with a GPU, else a CPU build if available.

    A CPU wheel in a find-links location is preferred, as it needs no network; then the torch
    project's own index, if reachable; else the default build.
    """
    if gpu:
        return Torch()
    environ = {**os.environ, **variables}
    locations = environ.get("UV_FIND_LINKS", "").split(",")
    offered = cpu_torch(name for at in locations if at.strip() for name in links(at.strip()))
    if offered is not None:
        return Torch(requirement=f"torch=={offered}")
    return Torch(backend="cpu") if torch_backend_answers(uv, environ) else Torch()
