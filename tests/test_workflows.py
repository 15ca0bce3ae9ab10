"""What runs where the repository is hosted names sessions, packages and files that there are."""

import ast
import re
import shlex
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml

from tools.release import checked, expect_on_main

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
# Beside the tests of each package.
CI = {"lint", "types", "docs", "sanitize", "compile", "wheels", "models", "vllm"}
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
    (given,) = re.findall(r"^sessions=\((.*?)^\)", script, re.MULTILINE | re.DOTALL)
    named = shlex.split(given)
    assert len(named) == len({*named})
    assert {*named} <= {*CI, *(f"tests({name})" for name in (*PACKAGES, "across"))}
    assert {*named} >= CI
    assert "nox --list --json -s tests" in script  # the packages that are not named
    tests = next(path for path in WORKFLOWS if path.stem == "tests")
    assert sessions_named(tests) >= {*CI, "tests"} | {"slow", "sanitize-all"}


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
def test_actions_are_named_by_their_commit_and_say_their_version(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if "uses:" in line]
    assert lines
    for line in lines:
        said = r"\s*(- )?uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+"
        assert re.fullmatch(said, line), line


def test_an_action_is_the_same_in_all_workflows() -> None:
    used = {a for path in WORKFLOWS for a in re.findall(r"uses: (.+)", path.read_text())}
    names = [action.partition("@")[0] for action in used]
    assert len(names) == len({*names})


@each_workflow
def test_a_job_with_an_identity_runs_nothing_of_the_repository(path: Path) -> None:
    for job in read(path)["jobs"].values():
        if "id-token" in job.get("permissions", {}):
            assert all("uses" in step and "run" not in step for step in job["steps"])
            assert not any("checkout" in step["uses"] for step in job["steps"])


@each_workflow
def test_tools_are_installed_from_files_of_hashes(path: Path) -> None:
    text = path.read_text()
    given = re.findall(r"pip install (.*)", text)
    for words in given:
        hashed = re.fullmatch(r"--require-hashes -r (\.github/tools/\w+\.txt)", words)
        trial = words.startswith("--python try ")  # of a wheel that was uploaded before
        assert trial or (hashed is not None and (ROOT / hashed[1]).is_file()), words
    assert "uvx" not in text
    assert "pipx" not in text


def test_what_a_wheel_is_tried_with_cannot_change_it() -> None:
    steps = read(next(path for path in WORKFLOWS if path.stem == "release"))["jobs"]["native"][
        "steps"
    ]
    uploads = next(i for i, step in enumerate(steps) if "upload-artifact" in step.get("uses", ""))
    tries = [i for i, step in enumerate(steps) if "--python try" in step.get("run", "")]
    assert tries
    assert min(tries) > uploads


TOOLS = sorted(ROOT.glob(".github/tools/*.txt"))


@pytest.mark.parametrize("path", TOOLS, ids=lambda path: path.stem)
def test_a_file_of_tools_has_a_version_and_hashes_for_each(path: Path) -> None:
    text = re.sub(r" *#.*", "", path.read_text())
    entries = [entry for entry in re.split(r"\n(?=\S)", text.strip()) if entry.strip()]
    found = {}
    for entry in entries:
        named = re.match(r"([\w-]+)==([\w.]+)( ; [^\\]+)? ?\\\n", entry)
        assert named is not None, entry
        hashes = re.findall(r"--hash=sha256:[0-9a-f]{64}\b", entry)
        assert hashes
        assert len(hashes) == entry.count("--hash")
        found[named[1]] = named[2]
    wanted = re.findall(r"^[\w-]+", path.with_suffix(".in").read_text(), re.MULTILINE)
    assert {*wanted} <= {*found}
    assert "//" not in path.read_text()  # the address of an index, or of a file
    assert "index" not in text


def test_both_files_of_tools_have_the_same_uv() -> None:
    assert [path.stem for path in TOOLS] == ["nox", "release"]
    versions = {re.search(r"^uv==([\w.]+)", path.read_text(), re.MULTILINE)[1] for path in TOOLS}
    assert len(versions) == 1


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


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "commit.gpgsign=false")
    subprocess.run(("git", "-C", str(folder), *who, *words), check=True, capture_output=True)


def test_a_commit_that_is_not_on_main_is_not_released(tmp_path: Path) -> None:
    git(tmp_path, "init", "--initial-branch", "main")
    with pytest.raises(ValueError, match="is unknown: "):
        expect_on_main(tmp_path, "main")
    for name in ("one", "two"):
        git(tmp_path, "commit", "--allow-empty", "--message", name)
    expect_on_main(tmp_path, "main")
    git(tmp_path, "checkout", "--detach", "HEAD~1")
    expect_on_main(tmp_path, "main")
    git(tmp_path, "commit", "--allow-empty", "--message", "beside")
    with pytest.raises(ValueError, match="commit is not on main; merge it first"):
        expect_on_main(tmp_path, "main")


def test_a_release_sees_the_history_of_main() -> None:
    job = read(next(path for path in WORKFLOWS if path.stem == "release"))["jobs"]["check"]
    checkout, *_ = job["steps"]
    assert checkout["with"]["fetch-depth"] == 0
    run = next(step["run"] for step in job["steps"] if "run" in step)
    assert run.startswith("python tools/release.py ")


@pytest.mark.parametrize(
    ("tag", "title", "message"),
    [
        ("v0.1.0", "0.1.0", "names no release"),
        ("kv-quant-v", "0.1.0", "names no release"),
        ("kv-other-v0.1.0", "0.1.0", "no such package"),
        ("kv-quant-v0.2.0", "0.2.0", r"0\.2\.0, but the pyproject.toml of kv-quant has 0\.1\.0"),
        ("kv-quant-v0.1.0", "0.1.0 (not released)", "marks it as not released"),
        ("kv-quant-v0.1.0", "0.1.0rc1", "has no section of it"),
    ],
)
def test_any_other_tag_is_refused(tag: str, title: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        checked(tag, workspace(tmp_path, "kv-quant", "0.1.0", title))


def test_the_package_that_is_compiled_is_built_apart() -> None:
    jobs = read(next(path for path in WORKFLOWS if path.stem == "release"))["jobs"]
    assert jobs["pure"]["if"] == "needs.check.outputs.pure == 'true'"
    assert jobs["native"]["if"] == "needs.check.outputs.native == 'true'"
    compiled = [
        name
        for name in PACKAGES
        if "scikit-build-core" in (ROOT / "packages" / name / "pyproject.toml").read_text()
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
