"""Files are written by one helper, whole or not at all, everywhere but in folders of their own."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("packages/*/src", "tools", "benchmarks", "examples")
WRITES = {"write_text", "write_bytes", "savefig", "save_file", "mkstemp", "NamedTemporaryFile"}
ALLOWED = {  # each with where it writes
    "packages/kv-policy/src/kv_policy/files.py": "the helper itself",
    "packages/kv-eval/src/kv_eval/evaluate/harness_tasks.py": "a temporary folder",
    "packages/kv-transformers/src/kv_transformers/models/convert.py": "a folder that is renamed",
    "packages/kv-transformers/src/kv_transformers/checkpoint.py": "a folder that is renamed",
    "packages/kv-eval/src/kv_eval/vllm/capacity.py": "a temporary folder",
    "benchmarks/_zack_bases.py": "memory",
    "benchmarks/_bare.py": "a temporary folder",
    "benchmarks/_gpu_child.py": "rows, one after the other",
    "benchmarks/_gpu_parts.py": "what a process says",
    "benchmarks/_compiled.py": "a temporary file",
    "benchmarks/cpu_peers/_protocol.py": "what a process says",
    "benchmarks/peers/_work.py": "a temporary folder",
    "tools/sessions.py": "the folder of a nox session",
    "tools/upstream.py": "the cache of nox, where kv-policy is not installed",
}


def writes(path: Path) -> Iterator[str]:
    """What a file of code calls to write files, other than the helper."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        name = node.func.id if isinstance(node.func, ast.Name) else name
        modes = [a.value for a in node.args if isinstance(a, ast.Constant)]
        if name in WRITES or (name in ("open", "fdopen") and {"w", "wb", "a", "ab"} & {*modes}):
            yield name


SOURCES = sorted(p for folder in FOLDERS for p in ROOT.glob(f"{folder}/**/*.py"))


def test_files_are_written_by_one_helper() -> None:
    assert len(SOURCES) > 200
    found = {str(p.relative_to(ROOT)) for p in SOURCES if [*writes(p)]}
    assert found == {*ALLOWED}, "write with kv_policy.files.write_whole"


def test_no_name_beside_a_target_is_fixed() -> None:
    for path in SOURCES:
        text = path.read_text()
        assert not [end for end in ('".new"', '".tmp"', "getpid()}.") if end in text], path
