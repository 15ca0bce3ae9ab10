"""The packages of this repository on disk, and their declared dependencies on each other."""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PACKAGES = tuple(sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")))
NATIVE = "kv-cpu"  # the package that is compiled
EXAMPLES = tuple(sorted(path.parent.name for path in ROOT.glob("examples/*/pyproject.toml")))


def declared(package: str, *, tests: bool = False) -> set[str]:
    """Return our packages that this one, or its group `test`, depends on, recursively."""
    wanted = project(package)["project"]["dependencies"]
    if tests:
        wanted = wanted + project(package).get("dependency-groups", {}).get("test", [])
    direct = {Requirement(line).name for line in wanted} & {*PACKAGES}
    return direct.union(*(declared(name) for name in direct))


def extras(package: str) -> dict[str, set[str]]:
    """Return the extras of a package that bring packages of ours, with those packages."""
    offered = project(package)["project"].get("optional-dependencies", {})
    found = {
        name: {Requirement(line).name for line in lines} & {*PACKAGES}
        for name, lines in offered.items()
    }
    return {name: ours for name, ours in found.items() if ours}


def declared_by_extras(package: str) -> set[str]:
    """Return our packages that these extras bring, with their dependencies."""
    direct = {name for ours in extras(package).values() for name in ours}
    return direct.union(*(declared(name) for name in direct))


def project(package: str) -> dict[str, dict]:
    """Load a package's pyproject.toml."""
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())


def first_example(page: Path) -> str:
    """Return the first Python block of a page.

    Raises:
        ValueError: the page has none.
    """
    found = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    if found is None:
        raise ValueError(f"{page} has no Python block; begin with an example")
    return found[1]


def editable(packages: Iterable[str], examples: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the flags that install workspace members as editable.

    uv builds a folder that it is given anew each time. The package that is compiled is named by a
    group instead, so that it is compiled once for all environments, and again after a change.
    """
    packages = list(packages)
    folders = [f"packages/{name}" for name in packages if name != NATIVE]
    folders += [f"examples/{name}" for name in examples]
    groups = ["pyproject.toml:native"] if NATIVE in packages else []
    return flags("--editable", folders) + flags("--group", groups)


def flags(flag: str, values: Iterable[str]) -> tuple[str, ...]:
    """Return the values, each preceded by the flag."""
    return tuple(part for value in values for part in (flag, value))
