"""The build backend takes a compiler from pip where the machine has none, or on request."""

import platform
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

FILE = Path(__file__).parent.parent / "backend" / "kv_cpu_build.py"


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load the backend; what it passes on to scikit-build-core is returned."""
    spec = spec_from_file_location("kv_cpu_build", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)

    def passed(folder, settings, metadata=None):
        return {"settings": settings, "platform": module.os.environ.get("_PYTHON_HOST_PLATFORM")}

    core = SimpleNamespace(
        build_wheel=passed,
        build_editable=passed,
        prepare_metadata_for_build_wheel=passed,
        get_requires_for_build_wheel=lambda settings: ["ninja", *settings],
        get_requires_for_build_editable=lambda settings: ["ninja", *settings],
    )
    monkeypatch.setattr(module, "import_module", lambda name: core)
    monkeypatch.delenv("_PYTHON_HOST_PLATFORM", raising=False)
    return module


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Return a function that leaves one compiler on the path, which exits with a status."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)

    def put(status: int) -> Path:
        file = tmp_path / "g++"
        file.write_text(f"#!/bin/sh\nexit {status}\n")
        file.chmod(0o755)
        return file

    return put


@pytest.mark.parametrize(("status", "found"), [(0, "g++"), (1, None)])
def test_a_compiler_is_found_if_it_reads_cpp20(backend, alone, monkeypatch, status, found):
    file = alone(status)
    assert backend.compiler() == found
    monkeypatch.setenv("CXX", "nowhere++")
    assert backend.compiler() is None
    monkeypatch.setenv("CXX", f"{file} -v")
    assert backend.compiler() == (f"{file} -v" if found else None)


def test_a_compiler_of_the_machine_is_used(backend, alone):
    alone(0)
    assert backend.processor({}) is None
    assert backend.get_requires_for_build_wheel() == ["ninja"]
    given = {"cmake.build-type": "Debug"}
    assert backend.build_wheel("to", given) == {"settings": given, "platform": None}


@pytest.mark.parametrize("processor", ["aarch64", "x86_64"])
def test_without_one_pips_is_required(backend, alone, monkeypatch, processor):
    alone(1)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: processor)
    assert backend.processor(None) == processor
    assert backend.get_requires_for_build_wheel() == ["ninja", backend.ZIG]
    assert backend.get_requires_for_build_editable({}) == ["ninja", backend.ZIG]


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "riscv64")])
def test_elsewhere_cmake_looks_for_one(backend, alone, monkeypatch, system, machine):
    alone(1)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert backend.processor(None) is None


def test_it_is_selected_by_a_setting(backend, alone, monkeypatch, tmp_path):
    alone(0)
    assert backend.get_requires_for_build_wheel({"zig": "aarch64"}) == ["ninja", backend.ZIG]
    spec = ModuleSpec("ziglang", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(backend, "find_spec", lambda name: spec)
    built = backend.build_wheel("to", {"zig": "aarch64", "cmake.verbose": "true"})
    assert built["platform"] == "linux-aarch64"
    assert built["settings"] == {
        "cmake.verbose": "true",
        "cmake.define.CMAKE_TOOLCHAIN_FILE": str(FILE.parent.parent / "zig.cmake"),
        "cmake.define.KV_ZIG": str(tmp_path / "zig"),
        "cmake.define.KV_PROCESSOR": "aarch64",
    }
    assert (FILE.parent.parent / "zig.cmake").is_file()
    prepared = backend.prepare_metadata_for_build_wheel("to", {"zig": "aarch64"})
    assert prepared == {"settings": {}, "platform": "linux-aarch64"}
    assert "_PYTHON_HOST_PLATFORM" not in backend.os.environ


def test_another_processor_and_an_absent_compiler_are_refused(backend, monkeypatch):
    with pytest.raises(ValueError, match="zig is 'sparc'; it must be aarch64 or x86_64"):
        backend.build_wheel("to", {"zig": "sparc"})
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="install 'ziglang>="):
        backend.build_editable("to", {"zig": "x86_64"})
