"""Release tags: `kv-quant-v0.1.0` names a package and its version; other tags are refused.

`kv-all-v0.1.0` names every package that has this version. Only the standard library is used, as
this runs before anything is installed.
"""

import json
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
MAIN = "refs/remotes/origin/main"
ALL = "kv-all"
NATIVE = "kv-cpu"  # is built on a machine of each platform
TAG = re.compile(r"(?P<package>[a-z][a-z-]*)-v(?P<version>\d[^/\s]*)")


class Release(NamedTuple):
    """The package and version that a tag names."""

    package: str
    version: str


def named(tag: str) -> Release:
    """Parse a tag.

    Raises:
        ValueError: the tag is not a package, `-v` and a version.
    """
    found = TAG.fullmatch(tag)
    if found is None:
        raise ValueError(f"the tag {tag!r} names no release; use a form such as kv-quant-v0.1.0")
    return Release(found["package"], found["version"])


def checked(tag: str, root: Path = ROOT) -> Release:
    """Parse a tag and compare it with the package's version and changelog.

    Raises:
        ValueError: the package does not exist, it has another version, or its CHANGELOG.md has no
            section of that version or marks it as not released.
    """
    release = named(tag)
    folder = root / "packages" / release.package
    if not (folder / "pyproject.toml").is_file():
        raise ValueError(f"the tag {tag!r} names {release.package}, but no such package exists")
    version = _project(folder)["version"]
    if version != release.version:
        raise ValueError(
            f"the tag {tag!r} names version {release.version}, but the pyproject.toml of "
            f"{release.package} has {version}"
        )
    titles = re.findall(r"^## (.+)$", (folder / "CHANGELOG.md").read_text(), re.MULTILINE)
    title = next((each for each in titles if each.split()[0] == version), None)
    if title is None or "not released" in title:
        said = "has no section of it" if title is None else "marks it as not released"
        raise ValueError(f"{release.package} {version} cannot be released: its CHANGELOG.md {said}")
    return release


def releases(tag: str, root: Path = ROOT) -> tuple[Release, ...]:
    """Return what a tag releases; a package comes after those that it depends on.

    Raises:
        ValueError: as `checked`, or the tag names all packages and none has this version.
    """
    asked = named(tag)
    if asked.package != ALL:
        return (checked(tag, root),)
    wanted = [
        name
        for name in order(root)
        if _project(root / "packages" / name)["version"] == asked.version
    ]
    if not wanted:
        raise ValueError(f"the tag {tag!r} names version {asked.version}, which no package has")
    return tuple(checked(f"{name}-v{asked.version}", root) for name in wanted)


def order(root: Path = ROOT) -> tuple[str, ...]:
    """Return all packages, each after those that it depends on; extras do not count."""
    projects = {path.parent.name: _project(path.parent) for path in _files(root)}
    needs = {
        name: [_name(line) for line in found.get("dependencies", []) if _name(line) in projects]
        for name, found in projects.items()
    }
    return tuple(TopologicalSorter(needs).static_order())


def _files(root: Path) -> list[Path]:
    return sorted(root.glob("packages/*/pyproject.toml"))


def _project(folder: Path) -> dict:
    found: dict = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return found


def _name(requirement: str) -> str:
    """Return the name of a requirement."""
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return found[0]


def expect_on_main(root: Path = ROOT, main: str = MAIN) -> None:
    """Check that the current commit is in the history of the main branch.

    Raises:
        ValueError: the commit is not in it, or the branch does not exist here.
    """
    command = ("git", "-C", str(root), "merge-base", "--is-ancestor", "HEAD", main)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 1:
        raise ValueError(f"the tag's commit is not on {main}; merge it first, then tag it")
    if done.returncode:
        raise ValueError(f"whether the tag's commit is on {main} is unknown: {done.stderr.strip()}")


def outputs(names: list[str]) -> str:
    """Return the lines that tell the workflow which packages are released, and of which kinds."""
    kinds = {"native": NATIVE in names, "pure": {*names} != {NATIVE}}
    found = {"packages": names, **kinds}
    return "\n".join(f"{name}={json.dumps(value)}" for name, value in found.items())


if __name__ == "__main__":
    try:
        expect_on_main()
        wanted = [release.package for release in releases(sys.argv[1])]
    except ValueError as error:
        sys.exit(str(error))
    print(outputs(wanted))
