"""Checks built distributions before an upload: `python -m tools.distributions FOLDER`.

The folder has one folder for each package, with its sdist and its wheels. Names, versions and
dependencies are compared with the pyproject.toml files of this commit. With a report of pip's
instead, `REPORT ADDRESS PACKAGE...`, packages are checked to have been installed from an index.
"""

import json
import re
import sys
import tarfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from email.message import Message
from email.parser import BytesParser
from pathlib import Path
from typing import Final
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

from tools.workspace import PACKAGES, ROOT, project

LICENSE: Final = "Apache-2.0"
# A link of Markdown that leads to a file: an index page has no other file of the repository.
RELATIVE: Final = re.compile(r"\]\((?!https://|#|mailto:)([^)]*)\)")


def versions() -> dict[str, str]:
    """Return the version of every package of this commit."""
    return {name: str(project(name)["project"]["version"]) for name in PACKAGES}


def compatible(version: str) -> str:
    """Return the range in which siblings declare a version: from its minor version to the next."""
    major, minor, *_ = (int(part) for part in re.findall(r"\d+", version)[:2])
    return f">={major}.{minor},<{major}.{minor + 1}"


def wrong_ranges(lines: list[str], known: Mapping[str, str]) -> Iterator[str]:
    """Yield the requirements of our packages that are not the range of this commit's version.

    Args:
        lines: requirements.
        known: versions by package; other requirements are ignored.
    """
    for line in lines:
        need = Requirement(line)
        if need.name in known:
            right = compatible(known[need.name])
            if need.specifier != Requirement(f"{need.name}{right}").specifier:
                yield f"requires {need.name}{need.specifier}; declare {need.name}{right}"


def of_wheel(path: Path) -> tuple[Message, set[str]]:
    """Return the metadata of a wheel, and the names of its files."""
    with ZipFile(path) as file:
        names = set(file.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        return BytesParser().parsebytes(file.read(metadata)), names


def of_sdist(path: Path) -> tuple[Message, set[str]]:
    """Return the metadata of an sdist, and the names of its files without the first folder."""
    with tarfile.open(path) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
        info = file.extractfile(f"{path.name.removesuffix('.tar.gz')}/PKG-INFO")
        if info is None:
            raise ValueError(f"{path.name} has a PKG-INFO that is no file")
        return BytesParser().parsebytes(info.read()), names


def metadata_faults(found: Message, package: str, known: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with the metadata of a distribution."""
    about = project(package)["project"]
    for field, right in (
        ("Name", package),
        ("Version", known[package]),
        ("License-Expression", LICENSE),
        ("License-File", "LICENSE"),
        ("Summary", about["description"]),
        ("Requires-Python", about["requires-python"]),
        ("Description-Content-Type", "text/markdown"),
    ):
        if (given := found[field]) != right:
            yield f"{field} is {given!r}; it should be {right!r}"
    for entry in found.get_all("Project-URL", []):
        if not entry.partition(", ")[2].startswith("https://"):
            yield f"Project-URL {entry!r} is no https address"
    yield from wrong_ranges(found.get_all("Requires-Dist", []), known)
    described = found.get_payload(decode=True)
    assert isinstance(described, bytes)
    text = described.decode()
    if not text.strip():
        yield "it has no description; the README is left out"
    for target in RELATIVE.findall(text):
        yield f"its README links to {target}, which an index does not have; use an https address"


def faults(folder: Path, package: str, known: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with the distributions of a package, one sentence each."""
    module = package.replace("-", "_")
    sdists, wheels = sorted(folder.glob("*.tar.gz")), sorted(folder.glob("*.whl"))
    if len(sdists) != 1 or not wheels:
        yield f"{package} has {len(sdists)} sdists and {len(wheels)} wheels; build one sdist first"
    for path in sdists:
        if parse_sdist_filename(path.name)[0] != canonicalize_name(package):
            yield f"{path.name} is not an sdist of {package}"
        found, names = of_sdist(path)
        wanted = {"LICENSE", "README.md", "pyproject.toml", f"src/{module}/py.typed"}
        yield from (f"{path.name} lacks {name}" for name in sorted(wanted - names))
        yield from (f"{path.name}: {each}" for each in metadata_faults(found, package, known))
    for path in wheels:
        name, version, _, _ = parse_wheel_filename(path.name)
        if name != canonicalize_name(package):
            yield f"{path.name} is not a wheel of {package}"
        found, names = of_wheel(path)
        wanted = {f"{module}/py.typed", f"{module}-{version}.dist-info/licenses/LICENSE"}
        yield from (f"{path.name} lacks {name}" for name in sorted(wanted - names))
        yield from (f"{path.name}: {each}" for each in metadata_faults(found, package, known))


def not_from(report: Path, address: str, wanted: Collection[str]) -> Iterator[str]:
    """Yield the packages that pip did not install from an index, by its `--report`.

    Another index may have a package of the same name.
    """
    installed = json.loads(report.read_text())["install"]
    given = {
        canonicalize_name(each["metadata"]["name"]): each["download_info"]["url"]
        for each in installed
    }
    for name in sorted({*wanted} | (given.keys() & {*PACKAGES})):
        if name not in wanted:
            yield f"{name} was installed, but nothing declares it"
        elif not given.get(name, "").startswith(f"{address}/"):
            yield f"{name} was not installed from {address}, but from {given.get(name)}"


def main(folder: Path, *installed: str) -> int:
    """Print what is wrong; return exit code 1 if anything is."""
    if installed:
        address, *wanted = installed
        return told(list(not_from(folder, address, wanted)), f"{len(wanted)} came from {address}")
    known = versions()
    packages = sorted(path.name for path in folder.iterdir() if path.is_dir())
    found = [f"{name} is no package of {ROOT.name}" for name in packages if name not in known]
    for package in packages:
        if package in known:
            found += faults(folder / package, package, known)
    if not packages:
        found.append(f"{folder} has no folder of a package")
    return told(found, f"distributions of {len(packages)} packages can be uploaded")


def told(found: Sequence[str], right: str) -> int:
    """Print what is wrong, or that all is right; return the exit code."""
    for sentence in found:
        print(sentence, file=sys.stderr)
    if not found:
        print(right)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), *sys.argv[2:]))
