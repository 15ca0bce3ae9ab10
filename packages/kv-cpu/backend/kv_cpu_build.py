"""The build backend: that of scikit-build-core, with a compiler from pip where there is none.

On Linux without a C++20 compiler the build requires the pip package `ziglang`, which contains clang
with the headers and libraries of glibc. The setting `zig` selects it, for a processor that need not
be this machine's: `--config-setting zig=aarch64`.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Final

Settings = Mapping[str, str | list[str]]

ZIG: Final = "ziglang>=0.17,<0.18"  # its command line may change with each of its versions
PROCESSORS: Final = ("aarch64", "x86_64")
# Older compilers lack one of these two headers, or do not know the flag.
CPP20: Final = "#include <concepts>\n#include <span>\nstatic_assert(std::integral<int>);\n"


def compiler() -> str | None:
    """Return the C++ compiler that CMake would use, if it supports C++20; None: not found."""
    named = os.environ.get("CXX")
    for name in (named,) if named else ("c++", "g++", "clang++"):
        command = (*shlex.split(name), "-std=c++20", "-fsyntax-only", "-x", "c++", "-")
        if shutil.which(command[0]) is None:
            continue
        done = subprocess.run(command, input=CPP20, capture_output=True, text=True, check=False)
        return name if done.returncode == 0 else None
    return None


def processor(settings: Settings | None) -> str | None:
    """Return the processor to compile for with zig; None: the machine's own compiler is used.

    Raises:
        ValueError: the setting `zig` names no supported processor.
    """
    given = (settings or {}).get("zig")
    if given is None:
        here = platform.machine()
        replaced = sys.platform == "linux" and here in PROCESSORS and compiler() is None
        return here if replaced else None
    if given not in PROCESSORS:
        raise ValueError(f"the setting zig is {given!r}; it must be {' or '.join(PROCESSORS)}")
    return str(given)


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    """Return what a wheel is built with."""
    return _core().get_requires_for_build_wheel(_rest(config_settings)) + _zig(config_settings)


def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    """Return what an editable install is built with."""
    return _core().get_requires_for_build_editable(_rest(config_settings)) + _zig(config_settings)


def get_requires_for_build_sdist(config_settings: Settings | None = None) -> list[str]:
    """Return what a source distribution is built with."""
    return _core().get_requires_for_build_sdist(_rest(config_settings))


def build_wheel(
    wheel_directory: str,
    config_settings: Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build a wheel."""
    with _compiling(config_settings) as settings:
        return _core().build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build an editable install."""
    with _compiling(config_settings) as settings:
        return _core().build_editable(wheel_directory, settings, metadata_directory)


def build_sdist(sdist_directory: str, config_settings: Settings | None = None) -> str:
    """Build a source distribution; nothing is compiled."""
    return _core().build_sdist(sdist_directory, _rest(config_settings))


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: Settings | None = None
) -> str:
    """Write the metadata of a wheel; nothing is compiled."""
    with _platform(processor(config_settings)):
        return _core().prepare_metadata_for_build_wheel(metadata_directory, _rest(config_settings))


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: Settings | None = None
) -> str:
    """Write the metadata of an editable install; nothing is compiled."""
    given = _rest(config_settings)
    return _core().prepare_metadata_for_build_editable(metadata_directory, given)


def _core() -> ModuleType:
    """Import scikit-build-core, which only a build needs: this file is also read without it."""
    return import_module("scikit_build_core.build")


def _zig(settings: Settings | None) -> list[str]:
    """Return the requirement of zig, if it compiles."""
    return [] if processor(settings) is None else [ZIG]


def _rest(settings: Settings | None) -> dict[str, str | list[str]]:
    """Return the settings of scikit-build-core."""
    return {name: value for name, value in (settings or {}).items() if name != "zig"}


@contextmanager
def _compiling(settings: Settings | None) -> Iterator[dict[str, str | list[str]]]:
    """Yield the settings of scikit-build-core, with those of zig if it compiles."""
    target = processor(settings)
    if target is None:
        yield _rest(settings)
        return
    found = find_spec("ziglang")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"ziglang is not installed; install {ZIG!r}, or a C++20 compiler")
    with _platform(target):
        yield _rest(settings) | {
            "cmake.define.CMAKE_TOOLCHAIN_FILE": str(Path(__file__).parent.parent / "zig.cmake"),
            "cmake.define.KV_ZIG": str(Path(found.submodule_search_locations[0]) / "zig"),
            "cmake.define.KV_PROCESSOR": target,
        }


@contextmanager
def _platform(target: str | None) -> Iterator[None]:
    """Set what names the platform of a wheel, if it is compiled with zig for a processor."""
    name = "_PYTHON_HOST_PLATFORM"  # of sysconfig
    before = os.environ.get(name)
    if target is not None:
        os.environ[name] = f"linux-{target}"
    try:
        yield
    finally:
        if target is not None:
            os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
