"""Checks installed wheels: they contain every source file, and work together."""

import sys
from importlib import import_module
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parent.parent
SKIPPED = frozenset({".pyc", ".so"})  # build products in the source tree


def lacking(wheel: Path, source: Path) -> list[str]:
    """Return the files under a source folder that a wheel lacks."""
    held = set(ZipFile(wheel).namelist())
    files = (path for path in source.rglob("*") if path.is_file() and path.suffix not in SKIPPED)
    wanted = {path.relative_to(source).as_posix() for path in files}
    return sorted(wanted - held)


def package_of(wheel: Path) -> str:
    """Return the package of a wheel."""
    return wheel.name.split("-")[0].replace("_", "-")


def tried() -> list[str]:
    """Return what does not work: native code, or the policies of a package."""
    from kv_attention import available
    from kv_policy import installed

    found = [] if available()["cpu"] is None else [f"kv-cpu: {available()['cpu']}"]
    wanted = {"k8v4": "kv-quant", "snapkv": "kv-evict", "zack": "kv-svd"}
    names = set(installed())
    return found + [
        f"{package}: no {name}" for name, package in wanted.items() if name not in names
    ]


def main(wheels: list[Path]) -> None:
    """Fail with all defects."""
    wrong = []
    for wheel in wheels:
        package = package_of(wheel)
        module = import_module(package.replace("-", "_"))
        if ROOT in Path(str(module.__file__)).parents and ".nox" not in str(module.__file__):
            wrong.append(f"{package} comes from the tree, not from its wheel")
        missing = lacking(wheel, ROOT / "packages" / package / "src")
        wrong += [f"{package}: {name} is not in the wheel" for name in missing]
    wrong += tried()
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{len(wheels)} wheels contain all of their sources, and work")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
