"""Release tags: `kv-quant-v0.1.0` names a package and its version; other tags are refused."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
MAIN = "refs/remotes/origin/main"
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
    version = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["version"]
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


if __name__ == "__main__":
    try:
        expect_on_main()
        release = checked(sys.argv[1])
    except ValueError as error:
        sys.exit(str(error))
    print(f"package={release.package}\nversion={release.version}")
