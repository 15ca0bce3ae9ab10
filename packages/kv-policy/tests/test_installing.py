"""Suggested commands use the folder of a checkout, else a name; in this environment."""

import json
import shlex
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from kv_policy.installing import checkout_of, install_command, uninstall_command, versions

NEEDS = {"kv-policy": [], "kv-odd": ["kv-even>=0.1,<0.2", "torch"], "kv-even": ["kv-policy>=0.1"]}


class World:
    """An environment with only the package kv-policy installed."""

    def __init__(self, site: Path, patch: pytest.MonkeyPatch) -> None:
        self.site = site
        patch.setattr(sys, "path", [str(site)])

    def install(self, name: str, direct: object) -> None:
        info = self.site / f"{name.replace('-', '_')}-0.1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
        if direct is not None:
            (info / "direct_url.json").write_text(json.dumps(direct))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path / "site", monkeypatch)


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    folder = tmp_path / "a checkout" / "packages"
    for name, needs in NEEDS.items():
        (folder / name).mkdir(parents=True)
        project = f"[project]\nname = {name!r}\ndependencies = {needs!r}\n"
        (folder / name / "pyproject.toml").write_text(project)
    return folder


def words(command: str) -> list[str]:
    found = shlex.split(command)
    assert found[:5] == ["uv", "pip", "install", "--python", sys.executable]
    return found[5:]


@pytest.mark.parametrize("editable", [{}, {"editable": True}])
def test_in_a_checkout_packages_are_named_by_their_folders(
    world: World, packages: Path, editable: dict[str, bool]
) -> None:
    world.install("kv-policy", {"url": (packages / "kv-policy").as_uri(), "dir_info": editable})
    assert checkout_of("kv-odd") == packages / "kv-odd"
    odd, even, own = (str(packages / name) for name in ("kv-odd", "kv-even", "kv-policy"))
    assert words(install_command("kv-odd")) == [odd, even]  # pip finds no siblings by itself
    assert words(install_command("kv-policy", again=True)) == ["--force-reinstall", own]
    world.install("kv-even", None)
    assert words(install_command("kv-odd")) == [odd]
    assert words(install_command("kv-odd", deps=False)) == ["--no-deps", odd]


@pytest.mark.parametrize(
    "direct",
    [
        None,
        {"url": "https://example.org/kv_policy-0.1.0.whl", "archive_info": {}},
        {"url": "file:///wheels/kv_policy-0.1.0-py3-none-any.whl", "archive_info": {}},
        {"url": "https://example.org/x.git", "vcs_info": {"vcs": "git", "commit_id": "0"}},
        {"url": "file:///a/folder/that/is/gone", "dir_info": {}},
        {"url": 3, "dir_info": {}},
        {"dir_info": {}},
        ["dir_info"],
    ],
)
def test_elsewhere_packages_are_named_by_their_names(
    world: World, packages: Path, direct: object
) -> None:
    world.install("kv-policy", direct)
    assert checkout_of("kv-odd") is None
    assert words(install_command("kv-odd")) == ["kv-odd"]


def test_what_is_not_ours_is_named_by_its_name_and_quoted(world: World, packages: Path) -> None:
    world.install("kv-policy", {"url": (packages / "kv-policy").as_uri(), "dir_info": {}})
    (packages / "torch").mkdir()  # a folder alone is not a package
    assert words(install_command("torch")) == ["torch"]
    assert "'lm-eval>=0.4.13'" in install_command("lm-eval>=0.4.13")
    assert words(install_command("lm-eval>=0.4.13")) == ["lm-eval>=0.4.13"]


def test_a_package_that_was_installed_from_a_folder_of_its_own(
    world: World, packages: Path, tmp_path: Path
) -> None:
    world.install("kv-policy", None)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "pyproject.toml").write_text("[project]\nname = 'kv-mine'\n")
    world.install("kv-mine", {"url": (tmp_path / "mine").as_uri(), "dir_info": {}})
    command = words(install_command("kv-mine", again=True, deps=False))
    assert command == ["--force-reinstall", "--no-deps", str(tmp_path / "mine")]


def test_pip_is_used_where_the_environment_has_it(world: World) -> None:
    world.install("pip", None)
    found = shlex.split(install_command("torch"))
    assert found == [sys.executable, "-m", "pip", "install", "torch"]
    assert shlex.split(uninstall_command("torchvision"))[1:] == [
        "-m",
        "pip",
        "uninstall",
        "torchvision",
    ]


def test_the_module_pip_is_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        """As in setuptools: a search for pip changes later imports."""

        searched: ClassVar[list[str]] = []

        @classmethod
        def find_spec(cls, name: str, *_: object) -> None:
            cls.searched.append(name)

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    install_command("torch")
    assert "pip" not in Finder.searched


def test_versions_name_what_a_result_depends_on() -> None:
    found = versions()
    assert {"python", "torch", "kv-policy"} <= set(found)
    assert list(found) == sorted(found)
