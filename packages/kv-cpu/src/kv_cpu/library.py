"""The compiled library: where it is, whether it loads, and which instruction sets it may use."""

import os
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

import torch

FORCE: Final = "KV_CPU_ISA"  # the environment variable that names an instruction set
FILE: Final = "libkv_cpu.so"
INTERFACE: Final = 2  # what the operators take and give back; the library says the same


def missing() -> str | None:
    """Say why the library cannot be used on this machine; None if it can."""
    reason = _load()
    if reason is None:
        try:
            chosen()
        except ValueError as error:
            reason = str(error)
    return reason


def compiled() -> tuple[str, ...]:
    """Give the instruction sets that the library has kernels for, the fastest last.

    Raises:
        OSError: the library cannot be loaded.
    """
    return _names(everything=True)


def runnable() -> tuple[str, ...]:
    """Give those that this processor has too; `plain` is always among them.

    `amx-emulated` is for tests: it is never the last, so it is used only where `KV_CPU_ISA` names
    it. Prompts under `vnni` use AMX where it is.

    Raises:
        OSError: the library cannot be loaded.
    """
    return _names(everything=False)


def chosen() -> str:
    """Give the instruction set to use: the last that runs here, or what the environment names.

    Raises:
        OSError: the library cannot be loaded.
        ValueError: `KV_CPU_ISA` names one that does not run here.
    """
    found = runnable()
    name = os.environ.get(FORCE)
    if not name:
        return found[-1]
    if name not in found:
        raise ValueError(f"{FORCE} is {name!r}; this machine can run {', '.join(found)}")
    return name


def forced() -> str | None:
    """Give the assignment by which the environment chooses an instruction set, if it does."""
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
    """Say why a file is no whole library of 64 bits; the loader crashes on some others."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        return f"its library does not load: {error}"
    if len(head) < 64 or head[:5] != b"\x7fELF\x02":
        return f"its library does not load: {path} is no library for this machine"
    # The table of sections, by e_shoff, e_shentsize and e_shnum, is what a file ends with.
    end = int.from_bytes(head[40:48], "little") + int.from_bytes(
        head[58:60], "little"
    ) * int.from_bytes(head[60:62], "little")
    if end > size:
        return f"its library does not load: {path} was cut off at {size} of {end} bytes"
    return None


def _loaded(path: Path) -> str | None:
    """Load the library; say why it cannot be used, if it cannot."""
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"its library does not load: {error}"
    number = getattr(torch.ops.kv_cpu, "interface", None)
    found = 0 if number is None else number()
    if found != INTERFACE:
        return (
            f"its library {path} has interface {found}, and these sources have {INTERFACE}: it was "
            "built from others; install or build kv-cpu again"
        )
    return None


def folders() -> list[Path]:
    """Give the folders where the library may lie.

    An editable install keeps what was built apart from the sources, and an import hook may know the
    sources alone; the metadata of the install says where the rest is.
    """
    found = [Path(folder) for folder in sys.modules[__package__].__path__]
    with suppress(PackageNotFoundError):
        found.append(Path(str(distribution("kv-cpu").locate_file("kv_cpu"))))
    return found
