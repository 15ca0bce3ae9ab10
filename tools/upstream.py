"""Compare what kv-serve uses of vLLM with the sources of another version.

Nothing of that vLLM is installed or imported: its Python sources are parsed, from the wheel on the
package index or from a checkout. So a version can be checked for which there is only a wheel for
GPUs. Compared are the interfaces that `kv_serve.vllm.adapters` lists, in the form of that version,
and every name that kv-serve imports from it. Of a checkout the version is not known: it is taken
for a new one.
"""

import argparse
import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from zipfile import ZipFile

import griffe

from kv_serve.vllm.adapters import CALLED, DIFFERENT, differs, overridden
from kv_serve.vllm.versions import minor
from tools.workspace import ROOT

PACKAGE: Final = "vllm"
BRANCH: Final = "_since"  # in a test, it tells whether vLLM is of this version or a later one
OURS: Final = ROOT / "packages" / "kv-serve" / "src"
# Parts of the package that no interface is in, and that take most of the time to parse.
UNUSED: Final = (
    "model_executor/models/",
    "model_executor/kernels/",
    "transformers_utils/",
    "third_party/",
)


def download(version: str, folder: Path) -> Path:
    """Download the wheel of a version, whatever this machine is; return its path.

    Raises:
        subprocess.CalledProcessError: the index has no such wheel; pip printed why.
    """
    command = (sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest")
    platform = ("--platform", "manylinux_2_28_x86_64", "--only-binary", ":all:")
    subprocess.run((*command, str(folder), *platform, f"{PACKAGE}=={version}"), check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def extract(wheel: Path, folder: Path) -> Path:
    """Extract the Python sources of a wheel that interfaces may be in; return their folder."""
    with ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py")]
        unused = tuple(f"{PACKAGE}/{each}" for each in UNUSED)
        archive.extractall(folder, [name for name in names if not name.startswith(unused)])
    return folder


def parse(folder: Path) -> griffe.Module:
    """Parse the sources of the package in a folder.

    Raises:
        FileNotFoundError: the folder does not contain the package.
    """
    if not (folder / PACKAGE / "__init__.py").is_file():
        raise FileNotFoundError(
            f"{folder} has no folder {PACKAGE} with sources; give a version on the package index, "
            "such as 0.33.0, or a checkout of vLLM"
        )
    loader = griffe.GriffeLoader(search_paths=[folder], allow_inspection=False)
    found = loader.load(PACKAGE)
    loader.resolve_aliases(implicit=True, external=False)
    assert isinstance(found, griffe.Module)
    return found


def lines(version: str = "") -> list[tuple[str, bool]]:
    """List the interfaces that we use of a version, and whether parameters must be exactly these.

    Without a version, those of the newest.
    """
    exact = overridden(minor(version) or max(DIFFERENT))
    return [*((line, True) for line in exact), *((line, False) for line in CALLED)]


def imported(sources: Path = OURS, version: str = "") -> list[tuple[tuple[str, str], ...]]:
    """List the modules of vLLM that our sources import, and the names from each.

    The imports of one name in both branches of an `if` are alternatives of one entry, unless it
    tells versions apart and one is given.
    """
    found, known = set[tuple[tuple[str, str], ...]](), minor(version)
    for path in sources.rglob("*.py"):
        tree, either = ast.parse(path.read_text("utf-8")), set[tuple[str, str]]()
        if known is not None:
            tree = _Branches(known).visit(tree)
        for node in (each for each in ast.walk(tree) if isinstance(each, ast.If)):
            first, second = (
                [x for stmt in b for x in _imports(stmt)] for b in (node.body, node.orelse)
            )
            for one in first:
                pairs = tuple((one, other) for other in second if other[1] == one[1])
                found |= {*pairs}
                either |= {each for pair in pairs for each in pair}
        found |= {(each,) for each in _imports(tree) if each not in either}
    return sorted(found)


class _Branches(ast.NodeTransformer):
    """Leaves of each `if` that tells versions apart the branch of one version."""

    def __init__(self, known: tuple[int, int]) -> None:
        self.known = known

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        test, negated = node.test, False
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, negated = test.operand, True
        if not isinstance(test, ast.Call) or ast.unparse(test.func) != BRANCH:
            return node
        since = tuple(ast.literal_eval(each) for each in test.args)
        return node.orelse if (self.known >= since) == negated else node.body


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _is_theirs(node.module or ""):
            yield from ((node.module or "", each.name) for each in node.names)
        elif isinstance(node, ast.Import):
            yield from ((each.name, "") for each in node.names if _is_theirs(each.name))


def differences(vllm: griffe.Module, version: str = "") -> list[str]:
    """List, as clauses, how parsed sources differ from what we use of this version of them."""
    used = lines(version)
    found = [each for line, exact in used for each in _compare(vllm, line, exact=exact)]
    for each in imported(version=version):
        if not any(_has(vllm, module, name) for module, name in each):
            module, name = each[0]
            found.append(f"{module} has no {name}" if name else f"there is no module {module}")
    return found


def _has(vllm: griffe.Module, module: str, name: str) -> bool:
    try:
        _find(vllm, module, name)
    except (KeyError, griffe.AliasResolutionError, griffe.CyclicAliasError):
        return False
    return True


def _is_theirs(module: str) -> bool:
    return module.partition(".")[0] == PACKAGE


def _compare(vllm: griffe.Module, line: str, *, exact: bool) -> Iterator[str]:
    module, _, rest = line.partition(":")
    path, _, wanted = rest.partition("(")
    try:
        found = _find(vllm, module, path)
    except (KeyError, griffe.AliasResolutionError, griffe.CyclicAliasError):
        yield f"{module} has no {path}"
        return
    if not wanted:
        if "property" not in found.labels:
            yield f"{path} is not a property"
        return
    parameters = list(found.parameters or ())
    if parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    given = [each.name for each in parameters]
    needed = [
        each.name for each in parameters if each.required and "variadic" not in str(each.kind)
    ]
    yield from differs(path, wanted, given, needed, exact=exact)


def _find(vllm: griffe.Module, module: str, path: str) -> griffe.Object:
    names = module.split(".")[1:]
    found = vllm[names] if names else vllm
    for name in filter(None, path.split(".")):
        found = found.final_target if isinstance(found, griffe.Alias) else found
        found = found.all_members[name]
    return found.final_target if isinstance(found, griffe.Alias) else found


def main() -> int:
    """Print how a version differs; the exit status is 1 if it does, and 2 without sources."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="a version on the package index, or a checkout's folder")
    parser.add_argument("--report", type=Path, help="a JSON file for how many were compared")
    arguments = parser.parse_args()
    given, report = arguments.version, arguments.report
    with tempfile.TemporaryDirectory() as kept:
        folder, known = Path(given), ""
        if not folder.is_dir():
            known = given
            print(f"downloading the wheel of vLLM {given}", flush=True)
            try:
                wheel = download(given, Path(kept))
            except subprocess.CalledProcessError:
                print(f"vLLM {given} was not downloaded; pip said why", file=sys.stderr)
                return 2
            folder = extract(wheel, Path(kept) / "sources")
        print("parsing its sources", flush=True)
        try:
            found = differences(parse(folder), known)
        except FileNotFoundError as error:
            print(error, file=sys.stderr)
            return 2
    for each in found:
        print(f"* {each}")
    count = len(lines(known)) + len(imported(version=known))
    print(f"of {count} interfaces and imported names, {len(found)} differ in vLLM {given}")
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(json.dumps({"compared": count, "differ": len(found)}))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
