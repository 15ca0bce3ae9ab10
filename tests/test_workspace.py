"""Every package of the workspace is complete, and is named wherever packages are listed."""

import json
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools.workspace import NATIVE, editable, first_example

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
NAMES = [package.name for package in PACKAGES]
MODULES = [name.replace("-", "_") for name in NAMES]
POLICIES = {"kv_quant", "kv_evict", "kv_svd"}
HEAVY = {"transformers", "triton", "vllm", "gguf"}

each_package = pytest.mark.parametrize("package", PACKAGES, ids=NAMES)


def settings(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())


@each_package
def test_a_package_is_complete(package: Path) -> None:
    module = package / "src" / package.name.replace("-", "_")
    for path in (package / "README.md", package / "CHANGELOG.md", module / "py.typed"):
        assert path.is_file(), path
    assert (package / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert list((package / "tests").rglob("test_*.py")), "it has no tests of its own"
    assert settings(package)["project"]["name"] == package.name
    assert first_example(package / "README.md"), "nothing shows how it is used"


@each_package
def test_a_package_is_named_where_packages_are_listed(package: Path) -> None:
    module = package.name.replace("-", "_")
    root = settings(ROOT)["tool"]
    assert module in root["importlinter"]["root_packages"]
    assert any(module in layer for layer in root["importlinter"]["contracts"][0]["layers"])
    checked = next(o for o in root["pytest"]["ini_options"]["addopts"] if "jaxtyping" in o)
    assert module in checked.replace("=", ",").split(",")
    site = (ROOT / "mkdocs.yml").read_text()
    assert f"packages/{package.name}/src" in site
    assert f"api/{package.name}.md" in site
    assert f"::: {module}\n" in (ROOT / "docs" / "api" / f"{package.name}.md").read_text()


@each_package
def test_what_a_package_declares_follows_the_layers(package: Path) -> None:
    wanted = [Requirement(line) for line in settings(package)["project"]["dependencies"]]
    ours = {need.name: need.specifier for need in wanted if need.name in NAMES}
    engines = {"kv-attention", "kv-paging", "kv-policy"}
    policies = {"kv-evict", "kv-quant", "kv-svd"}  # to be there; they are found by name
    host = {"kv-runtime", "kv-transformers", "kv-policy"}
    layers = {
        "kv-policy": set(),
        "kv-cpu": engines,
        "kv-runtime": engines,
        "kv-transformers": {"kv-runtime", "kv-policy"} | policies,
        "kv-serve": host | engines | policies,
        "kv-eval": host | {"kv-serve"},
    }
    assert {*ours} == layers.get(package.name, {"kv-policy"})
    for specifier in ours.values():
        assert {one.operator for one in specifier} == {">=", "<"}, "declare a range"


def test_importing_packages_is_light_and_imports_no_policies() -> None:
    first = ", ".join(module for module in MODULES if module not in POLICIES)
    code = f"""
import json, sys, {first}
seen = [*sys.modules]
import {", ".join(sorted(POLICIES))}
print(json.dumps([seen, [*sys.modules]]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seen, everything = json.loads(done.stdout)
    assert not POLICIES & {*seen}
    assert not HEAVY & {*everything}


def test_every_entry_point_of_ours_can_be_loaded() -> None:
    groups = ("kv_policy", "kv_policy.backends")
    ours = [
        entry for group in groups for entry in entry_points(group=group) if entry.dist.name in NAMES
    ]
    assert {entry.name for entry in ours} >= {"raw", "k8v4", "streaming", "snapkv", "cpu"}
    for entry in ours:
        assert entry.load().name == entry.name


def test_every_module_behind_a_face_is_protected() -> None:
    """A new file of these packages is not imported by others unless it is listed here."""
    open_to_all = {
        "kv_runtime": set(),
        "kv_paging": {"torch_kernels"},
        "kv_attention": {"torch_backend", "compiled"},
    }
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    protected = [
        {module for module in each["protected_modules"]}
        for each in contracts["contracts"]
        if each["type"] == "protected"
    ]
    for package, others in open_to_all.items():
        folder = ROOT / "packages" / package.replace("_", "-") / "src" / package
        found = {path.stem for path in folder.glob("*.py")}
        found |= {path.parent.name for path in folder.glob("*/__init__.py")}
        wanted = {f"{package}.{name}" for name in found - others - {"__init__"}}
        assert wanted in protected


def test_what_is_compiled_is_installed_by_a_group_which_uv_builds_once() -> None:
    assert settings(ROOT)["dependency-groups"]["native"] == [NATIVE]
    given = editable([NATIVE, "kv-quant"], ["kv-vnorm"])
    assert given == (
        *("--editable", "packages/kv-quant", "--editable", "examples/kv-vnorm"),
        *("--group", "pyproject.toml:native"),
    )


def test_only_kv_cpu_names_itself() -> None:
    sources = (path for name in NAMES for path in (ROOT / "packages" / name / "src").rglob("*.py"))
    naming = {path for path in sources if "kv_cpu" in path.read_text()}
    assert {path.relative_to(ROOT).parts[1] for path in naming} == {"kv-cpu"}
