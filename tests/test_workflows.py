"""What runs where the repository is hosted names sessions, packages and files that there are."""

import ast
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml

from tools.release import checked

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
SESSION = re.compile(r'nox (?:--json -l )?-s "?([\w-]+)')

each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def read(path: Path) -> dict:
    found = yaml.safe_load(path.read_text())
    found["on"] = found.pop(True)  # YAML 1.1 reads `on` as a truth
    return found


def sessions_of_nox() -> set[str]:
    found = set()
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body:
        for mark in getattr(node, "decorator_list", ()):
            if ast.unparse(mark).startswith("nox.session"):
                given = {k.arg: ast.literal_eval(k.value) for k in getattr(mark, "keywords", ())}
                found.add(given.get("name", node.name))
    return found


def sessions_named(path: Path) -> set[str]:
    found = {*SESSION.findall(path.read_text())}
    for job in read(path)["jobs"].values():
        listed = job.get("strategy", {}).get("matrix", {}).get("session", [])
        found |= {*listed} if isinstance(listed, list) else set()
    return found


def grants(workflow: dict) -> list[dict[str, str]]:
    return [workflow["permissions"], *(j.get("permissions", {}) for j in workflow["jobs"].values())]


def test_the_workflows_are_there() -> None:
    assert [path.stem for path in WORKFLOWS] == ["docs", "release", "tests"]


@each_workflow
def test_every_session_that_is_named_exists(path: Path) -> None:
    assert sessions_named(path)
    assert sessions_named(path) <= sessions_of_nox()


def test_all_that_must_be_true_before_a_change_lands_is_run() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    aside, shown = (each.split() for each in re.findall(r"for session in ([\w ]+);", script))
    assert aside == shown
    wanted = {*aside, "tests", "vllm"}
    assert set(re.findall(r"python -m nox -s (\w+)", script)) == {"tests", "vllm"}
    tests = next(path for path in WORKFLOWS if path.stem == "tests")
    assert sessions_named(tests) >= wanted | {"slow", "sanitize-all"}


@each_workflow
def test_nothing_secret_is_asked_for_but_an_identity(path: Path) -> None:
    assert "secrets" not in path.read_text()
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    written = {name for each in grants(workflow) for name, right in each.items() if right != "read"}
    assert written == {"docs": {"id-token", "pages"}, "release": {"id-token"}}.get(path.stem, set())


@each_workflow
def test_a_workflow_takes_turns_and_ends(path: Path) -> None:
    workflow = read(path)
    assert workflow["concurrency"]["group"]
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())


@each_workflow
def test_actions_are_held_to_a_major_version(path: Path) -> None:
    steps = [step for job in read(path)["jobs"].values() for step in job["steps"]]
    used = [step["uses"] for step in steps if "uses" in step]
    assert used
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", action), action


@each_workflow
def test_what_others_can_name_is_never_part_of_a_script(path: Path) -> None:
    for job in read(path)["jobs"].values():
        for step in job["steps"]:
            assert "${{" not in step.get("run", ""), "hand it over in env"


def workspace(folder: Path, package: str, version: str, title: str) -> Path:
    home = folder / "packages" / package
    home.mkdir(parents=True)
    (home / "pyproject.toml").write_text(f'[project]\nname = "{package}"\nversion = "{version}"\n')
    (home / "CHANGELOG.md").write_text(f"# Changes\n\n## {title}\n\n* First.\n")
    return folder


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_can_be_released_by_a_tag(package: str, tmp_path: Path) -> None:
    release = next(path for path in WORKFLOWS if path.stem == "release")
    (pattern,) = read(release)["on"]["push"]["tags"]
    tag = f"{package}-v0.1.0"
    assert fnmatchcase(tag, pattern)
    root = workspace(tmp_path, package, "0.1.0", "0.1.0")
    assert checked(tag, root) == (package, "0.1.0")


@pytest.mark.parametrize(
    ("tag", "title", "message"),
    [
        ("v0.1.0", "0.1.0", "names no release"),
        ("kv-quant-v", "0.1.0", "names no release"),
        ("kv-other-v0.1.0", "0.1.0", "no such package"),
        ("kv-quant-v0.2.0", "0.2.0", r"0\.2\.0, and the pyproject.toml of kv-quant says 0\.1\.0"),
        ("kv-quant-v0.1.0", "0.1.0 (not released)", "calls it not released"),
        ("kv-quant-v0.1.0", "0.1.0rc1", "has no section of it"),
    ],
)
def test_any_other_tag_is_refused(tag: str, title: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        checked(tag, workspace(tmp_path, "kv-quant", "0.1.0", title))


def test_the_package_that_is_compiled_is_built_apart() -> None:
    jobs = read(next(path for path in WORKFLOWS if path.stem == "release"))["jobs"]
    assert jobs["pure"]["if"] == "needs.check.outputs.package != 'kv-cpu'"
    assert jobs["native"]["if"] == "needs.check.outputs.package == 'kv-cpu'"
    compiled = [
        name
        for name in PACKAGES
        if "scikit_build_core" in (ROOT / "packages" / name / "pyproject.toml").read_text()
    ]
    assert compiled == ["kv-cpu"]


def test_forms_for_issues_ask_each_thing_once() -> None:
    forms = sorted(ROOT.glob(".github/ISSUE_TEMPLATE/[!c]*.yml"))
    assert [path.stem for path in forms] == ["bug", "method"]
    for path in forms:
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= {*form}
        asked = [part["id"] for part in form["body"] if part["type"] != "markdown"]
        assert len(asked) == len({*asked}) > 1
