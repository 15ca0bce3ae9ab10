"""The compiled library: its path, whether it loads, and the instruction sets it may use."""

import os
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

import torch

FORCE: Final = "KV_CPU_ISA"  # the environment variable that names an instruction set
FILE: Final = "libkv_cpu.so"  # on macOS too: CMake calls a module so
MAGIC: Final = b"\xcf\xfa\xed\xfe" if sys.platform == "darwin" else b"\x7fELF\x02"
INTERFACE: Final = 14  # version of the operators' signatures; equal to the library's


def missing() -> str | None:
    """Return why the library is unavailable on this machine; None if it is available."""
    reason = _load()
    if reason is None:
        try:
            chosen()
        except ValueError as error:
            reason = str(error)
    return reason


def compiled() -> tuple[str, ...]:
    """Return the instruction sets of the library's kernels, the fastest last.

    Raises:
        OSError: the library cannot be loaded.
    """
    return _names(everything=True)


def runnable() -> tuple[str, ...]:
    """Return those that this processor supports; `plain` is always among them.

    `amx-emulated` is for tests: it is never the last, so it is used only if `KV_CPU_ISA` names it.
    Prompts under `vnni` use AMX if available.

    Raises:
        OSError: the library cannot be loaded.
    """
    return _names(everything=False)


def chosen() -> str:
    """Return the instruction set to use: the last available one, or that of the environment.

    Raises:
        OSError: the library cannot be loaded.
        ValueError: `KV_CPU_ISA` names one that is unavailable here.
    """
    found = runnable()
    name = os.environ.get(FORCE)
    if not name:
        return found[-1]
    if name not in found:
        raise ValueError(f"{FORCE} is {name!r}; this machine can run {', '.join(found)}")
    return name


def forced() -> str | None:
    """Return the environment's assignment of an instruction set, if any."""
    name = os.environ.get(FORCE)
    return f"{FORCE}={name}" if name else None


@cache
def _names(*, everything: bool) -> tuple[str, ...]:
    reason = _load()
    if reason is not None:
        raise OSError(reason)
    names: str = torch.ops.kv_cpu.isa(everything)
    return tuple(names.split())


@cache
def _load() -> str | None:
    for folder in folders():
        path = folder / FILE
        if path.is_file():
            return _wrong(path) or _loaded(path)
    return f"its library {FILE} was not built; install a wheel, or build it with a C++ compiler"


def _wrong(path: Path) -> str | None:
    """Return why a file is not a complete 64-bit library; Linux's loader crashes on some others."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        return f"its library does not load: {error}"
    if len(head) < 64 or not head.startswith(MAGIC):
        return f"its library does not load: {path} is not a library for this machine"
    if sys.platform == "darwin":
        return None
    # A file ends with the section header table, described by e_shoff, e_shentsize and e_shnum.
    end = int.from_bytes(head[40:48], "little") + int.from_bytes(
        head[58:60], "little"
    ) * int.from_bytes(head[60:62], "little")
    if end > size:
        return f"its library does not load: {path} is truncated at {size} of {end} bytes"
    return None


def _loaded(path: Path) -> str | None:
    """Load the library; return why it is unavailable, or None."""
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"its library does not load: {error}"
    number = getattr(torch.ops.kv_cpu, "interface", None)
    found = 0 if number is None else number()
    if found != INTERFACE:
        return (
            f"its library {path} has interface {found}, and these sources have {INTERFACE}: it was "
            "built from other sources; install or build kv-cpu again"
        )
    return None


def folders() -> list[Path]:
    """Return the folders that may contain the library.

    An editable install separates build outputs from the sources, and an import hook may know only
    the sources; the metadata of the install has the location of the rest.
    """
    found = [Path(folder) for folder in sys.modules[__package__].__path__]
    with suppress(PackageNotFoundError):
        found.append(Path(str(distribution("kv-cpu").locate_file("kv_cpu"))))
    return found
