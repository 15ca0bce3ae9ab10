"""A release names every package, in an order in which each can be installed, and checks them."""

import io
import json
import re
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from tools import distributions
from tools.distributions import compatible, faults, not_from, versions, wrong_ranges
from tools.release import ALL, NATIVE, order, outputs, releases
from tools.workspace import EXAMPLES, PACKAGES, ROOT, declared, project

JOBS = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]


def test_every_package_comes_after_those_that_it_needs() -> None:
    found = order()
    assert sorted(found) == [*PACKAGES]
    for place, name in enumerate(found):
        assert declared(name) <= {*found[:place]}


def test_packages_are_uploaded_in_that_order_one_after_the_other() -> None:
    assert JOBS["check"]["outputs"]["packages"] == "${{ steps.tag.outputs.packages }}"
    assert {*JOBS["publish"]["needs"]} == {*JOBS} - {"publish"}
    for name in ("test", "publish"):
        packages = JOBS[name]["strategy"]["matrix"]["package"]
        assert packages == "${{ fromJSON(needs.check.outputs.packages) }}"
    assert JOBS["publish"]["strategy"]["max-parallel"] == 1
    assert JOBS["publish"]["strategy"]["fail-fast"] is True


def test_an_upload_can_be_repeated_and_is_attested() -> None:
    (upload,) = (step for step in JOBS["publish"]["steps"] if "pypi-publish" in step["uses"])
    package = "${{ matrix.package }}"
    assert upload["with"] == {
        "packages-dir": f"dist/{package}",
        "attestations": True,
        "skip-existing": True,
    }
    assert JOBS["publish"]["permissions"] == {"id-token": "write"}
    assert JOBS["publish"]["environment"]["name"] == f"pypi-{package}"


def test_every_job_that_builds_puts_a_package_into_its_folder() -> None:
    for name, folder in (("pure", "dist/$package"), ("native", "dist/kv-cpu")):
        text = " ".join(step.get("run", "") for step in JOBS[name]["steps"])
        assert set(re.findall(r"--out(?:put)?-dir \"?([\w/$-]+)", text)) == {folder}
        uploads = [step["with"]["path"] for step in JOBS[name]["steps"] if "path" in str(step)]
        assert "dist" in uploads


def test_the_workflow_is_told_what_is_compiled_and_what_is_not() -> None:
    given = ["kv-policy", NATIVE]
    assert outputs(given) == 'packages=["kv-policy", "kv-cpu"]\nnative=true\npure=true'
    assert outputs([NATIVE]).endswith("native=true\npure=false")
    assert outputs(["kv-quant"]).endswith("native=false\npure=true")
    assert {line.partition("=")[0] for line in outputs(given).splitlines()} == {
        *JOBS["check"]["outputs"]
    }


def home(root: Path, name: str, version: str, needs: str = "", title: str = "") -> None:
    folder = root / "packages" / name
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "{name}"\nversion = "{version}"\ndependencies = [{needs}]\n'
    )
    (folder / "CHANGELOG.md").write_text(f"# Changes\n\n## {title or version}\n")


def test_a_tag_of_all_names_those_of_its_version(tmp_path: Path) -> None:
    home(tmp_path, "kv-a", "0.2.0", '"kv-b>=0.2,<0.3", "torch"')
    home(tmp_path, "kv-b", "0.2.0")
    home(tmp_path, "kv-c", "0.1.0", title="0.1.0 (not released)")
    assert [each.package for each in releases(f"{ALL}-v0.2.0", tmp_path)] == ["kv-b", "kv-a"]
    assert releases("kv-a-v0.2.0", tmp_path) == (("kv-a", "0.2.0"),)
    with pytest.raises(ValueError, match=r"version 0\.3\.0, which no package has"):
        releases(f"{ALL}-v0.3.0", tmp_path)
    with pytest.raises(ValueError, match=r"kv-c 0\.1\.0 cannot be released.* as not released"):
        releases(f"{ALL}-v0.1.0", tmp_path)


def requirements(package: str) -> list[str]:
    about = project(package)
    extras = about["project"].get("optional-dependencies", {})
    groups = about.get("dependency-groups", {})
    more = [line for lines in (*extras.values(), *groups.values()) for line in lines]
    return about["project"]["dependencies"] + more


@pytest.mark.parametrize("package", PACKAGES)
def test_siblings_are_declared_from_the_version_that_they_are_tested_with(package: str) -> None:
    assert list(wrong_ranges(requirements(package), versions())) == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_declares_them_in_the_same_way(example: str) -> None:
    text = (ROOT / "examples" / example / "pyproject.toml").read_text()
    lines = re.findall(r'"(kv-\w+[<>=][^"]*)"', text)
    assert lines
    assert list(wrong_ranges(lines, versions())) == []


def test_a_range_begins_at_the_minor_version() -> None:
    assert compatible("0.1.3") == ">=0.1,<0.2"
    assert compatible("2.10.0rc1") == ">=2.10,<2.11"
    assert "0.1.0" in SpecifierSet(compatible("0.1.0"))
    known = {"kv-quant": "0.2.0"}
    assert list(wrong_ranges(["kv-quant>=0.2,<0.3", "torch>=2"], known)) == []
    assert list(wrong_ranges(["kv-quant>=0.1,<0.3; extra == 'a'"], known)) == [
        "requires kv-quant<0.3,>=0.1; declare kv-quant>=0.2,<0.3"
    ]


METADATA = """Metadata-Version: 2.4
Name: kv-quant
Version: {version}
Summary: {summary}
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Dist: kv-policy{range}
Requires-Python: >=3.11
Description-Content-Type: text/markdown

# kv-quant
{text}
"""


def packed(folder: Path, *, lacking: str = "", **other: str) -> Path:
    """Write an sdist and a wheel of kv-quant."""
    about = project("kv-quant")["project"]
    version = about["version"]
    given = {"version": version, "summary": about["description"], "text": "", "range": ""}
    given["range"] = compatible(versions()["kv-policy"])
    metadata = METADATA.format(**(given | other))
    folder.mkdir()
    base, info = f"kv_quant-{version}", f"kv_quant-{version}.dist-info"
    wheel = {
        f"{info}/METADATA": metadata,
        f"{info}/licenses/LICENSE": "",
        "kv_quant/py.typed": "",
    }
    sdist = {"PKG-INFO": metadata, "src/kv_quant/py.typed": ""}
    sdist |= dict.fromkeys(("LICENSE", "README.md", "pyproject.toml"), "")
    with ZipFile(folder / f"{base}-py3-none-any.whl", "w") as file:
        for name, text in wheel.items():
            if not lacking or lacking not in name:
                file.writestr(name, text)
    with tarfile.open(folder / f"{base}.tar.gz", "w:gz") as file:
        for name, text in sdist.items():
            if not lacking or lacking not in name:
                entry = tarfile.TarInfo(f"{base}/{name}")
                entry.size = len(text.encode())
                file.addfile(entry, io.BytesIO(text.encode()))
    return folder


def test_what_is_complete_can_be_uploaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed(tmp_path / "kv-quant", text="[a](https://a.invalid) [b](#b)")
    assert distributions.main(tmp_path) == 0
    assert capsys.readouterr().out == "distributions of 1 packages can be uploaded\n"


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"version": "9.9.9"}, "Version is '9.9.9'; it should be"),
        ({"summary": "other"}, "Summary is 'other'; it should be"),
        ({"range": ">=0.0.1"}, "requires kv-policy>=0.0.1; declare kv-policy>="),
        ({"text": "[page](../../docs/index.md)"}, "its README links to ../../docs/index.md"),
        ({"lacking": "py.typed"}, "kv_quant/py.typed"),
        ({"lacking": "LICENSE"}, "lacks"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_what_is_wrong_is_said_of_both(
    other: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    found = list(faults(packed(tmp_path / "kv-quant", **other), "kv-quant", versions()))
    assert len(found) == 2
    assert all(sentence in each for each in found), found


def test_a_folder_without_an_sdist_or_of_no_package_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert distributions.main(tmp_path) == 1
    (tmp_path / "kv-quant").mkdir()
    (tmp_path / "other").mkdir()
    assert distributions.main(tmp_path) == 1
    said = capsys.readouterr().err
    assert "has no folder of a package" in said
    assert "kv-quant has 0 sdists and 0 wheels" in said
    assert "other is no package of" in said


def test_a_package_of_the_same_name_from_elsewhere_is_noticed(tmp_path: Path) -> None:
    def entry(name: str, url: str) -> dict[str, dict[str, str]]:
        return {"metadata": {"name": name}, "download_info": {"url": url}}

    here = "http://127.0.0.1:1"
    report = tmp_path / "report.json"
    given = [entry("kv_serve", f"{here}/a.whl"), entry("torch", "https://b.invalid/t.whl")]
    report.write_text(json.dumps({"install": [*given, entry("kv-cpu", "https://b.invalid/c")]}))
    assert list(not_from(report, here, ["kv-serve", "kv-cpu", "kv-policy"])) == [
        f"kv-cpu was not installed from {here}, but from https://b.invalid/c",
        f"kv-policy was not installed from {here}, but from None",
    ]
    assert list(not_from(report, here, ["kv-serve"])) == [
        "kv-cpu was installed, but nothing declares it"
    ]
