"""The packages of this repository, as they lie on the disk, and what each declares of others."""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PACKAGES = tuple(sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")))
EXAMPLES = tuple(sorted(path.parent.name for path in ROOT.glob("examples/*/pyproject.toml")))


def declared(package: str, *, tests: bool = False) -> set[str]:
    """Names the packages of ours that this one, or its own group `test`, declares, and theirs."""
    wanted = project(package)["project"]["dependencies"]
    if tests:
        wanted = wanted + project(package).get("dependency-groups", {}).get("test", [])
    direct = {Requirement(line).name for line in wanted} & {*PACKAGES}
    return direct.union(*(declared(name) for name in direct))


def extras(package: str) -> dict[str, set[str]]:
    """Names the extras of a package that bring packages of ours, and which these are."""
    offered = project(package)["project"].get("optional-dependencies", {})
    found = {
        name: {Requirement(line).name for line in lines} & {*PACKAGES}
        for name, lines in offered.items()
    }
    return {name: ours for name, ours in found.items() if ours}


def declared_by_extras(package: str) -> set[str]:
    """Names the packages of ours that these extras bring, and those that they declare."""
    direct = {name for ours in extras(package).values() for name in ours}
    return direct.union(*(declared(name) for name in direct))


def project(package: str) -> dict[str, dict]:
    """Reads a package's pyproject.toml."""
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())


def first_example(page: Path) -> str:
    """Reads the first block of Python of a page; it has one."""
    found = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    if found is None:
        raise ValueError(f"{page} has no block of Python; begin with an example")
    return found[1]


def editable(packages: Iterable[str], examples: Iterable[str] = ()) -> tuple[str, ...]:
    """Asks for members of the workspace as they stand in the tree."""
    folders = [f"packages/{name}" for name in packages] + [f"examples/{name}" for name in examples]
    return flags("--editable", folders)


def flags(flag: str, values: Iterable[str]) -> tuple[str, ...]:
    """Puts the flag before each value."""
    return tuple(part for value in values for part in (flag, value))
