"""How the code is laid out, and how long a decode step takes beside the code before.

Rows of kind `package` count files and lines of a package's sources, and the longest chain of
imports in them. Rows of kind `decode` are steps of a batch of 8 sequences of 8,192 tokens over all
layers of a cache, by the code of this checkout and by that of another environment, in turn. `--old`
names the Python of that environment; without it nothing is timed. The minutes of CI are those that
the last whole `.ci/run` of this checkout, or of the one that `--ci` names, noted.
"""

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import median, quantiles

import _result

ROOT = Path(__file__).resolve().parent.parent
SEQUENCES, TOKENS, LAYERS, STEPS = 8, 8192, 4, 4
POLICIES = ("k8v4", "kv-compress:keep=25%+k8v4")

# What a process that times steps does: a policy starts a cache, an empty line some steps.
WORKER = """
import sys, time, torch
from kv_policy import CacheShape, parse
try:
    from kv_runtime import PolicyCache as Cache
except ImportError:
    from kv_serve.tiered import TieredCache as Cache
torch.set_num_threads(1)
shape = CacheShape({layers}, 3, 3, 64, 64, torch.bfloat16)
draw = torch.Generator().manual_seed(0)
def run(length):
    cache.begin(torch.ones({sequences}, length, dtype=torch.bool))
    for layer in range({layers}):
        q = torch.randn({sequences}, 3, 3, length, 64, generator=draw).bfloat16()
        k, v = torch.randn(2, {sequences}, 3, length, 64, generator=draw).bfloat16()
        cache.attend(layer, q, k, v, 0.125)
for line in sys.stdin:
    if line.strip():
        cache = Cache(parse(line.strip()), shape)
        run({tokens})
        print(0, flush=True)
        continue
    begun = time.thread_time()
    for _ in range({steps}):
        run(1)
    print((time.thread_time() - begun) / {steps}, flush=True)
"""


class Worker:
    """A process that times decode steps by the code of one environment."""

    def __init__(self, python: str, *, tokens: int) -> None:
        """Start it."""
        sizes = {"layers": LAYERS, "sequences": SEQUENCES, "steps": STEPS}
        code = WORKER.format(tokens=tokens, **sizes)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen((python, "-c", code), stdin=pipe, stdout=pipe, text=True)

    def ask(self, line: str = "") -> float:
        """Start a cache for a policy, or time some steps and give the seconds of one."""
        said, heard = self._process.stdin, self._process.stdout
        assert said is not None
        assert heard is not None
        print(line, file=said, flush=True)
        answer = heard.readline()
        if not answer:
            raise RuntimeError(f"a process ended with status {self._process.wait()}")
        return float(answer)

    def end(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()


def timed(old: str, rounds: int, tokens: int) -> Iterator[dict[str, object]]:
    """Time steps by both, turn by turn."""
    workers = {"old": Worker(old, tokens=tokens), "new": Worker(sys.executable, tokens=tokens)}
    try:
        for policy in POLICIES:
            for worker in workers.values():
                worker.ask(policy)
            seconds: dict[str, list[float]] = {name: [] for name in workers}
            for i in range(rounds + 2):
                turn = [*workers] if i % 2 else [*reversed(workers)]  # who is second is slower
                for name in turn:
                    taken = workers[name].ask()
                    if i >= 2:
                        seconds[name].append(taken)
            pairs = zip(seconds["new"], seconds["old"], strict=True)
            low, middle, high = quantiles((new / old for new, old in pairs), n=4)
            yield {
                "kind": "decode",
                "policy": policy,
                "sequences": SEQUENCES,
                "tokens": tokens,
                "layers": LAYERS,
                "new_ms": 1000 * median(seconds["new"]),
                "old_ms": 1000 * median(seconds["old"]),
                "new_over_old": middle,
                "quartiles": [low, high],
            }
    finally:
        for worker in workers.values():
            worker.end()


def modules() -> dict[str, Path]:
    """Find all source files, by module."""
    found = {}
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts[3:]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(paths: Mapping[str, Path]) -> dict[str, set[str]]:
    """Say which modules of ours each imports anywhere in its file."""
    return {name: {*_imported(path, paths)} - {name} for name, path in paths.items()}


def _imported(path: Path, paths: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in paths)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{each.name}" for each in node.names} & paths.keys()
            yield from inner
            if len(inner) < len(node.names) and node.module in paths:
                yield node.module


def circles(graph: Mapping[str, set[str]]) -> int:
    """Count the groups of files that import each other, directly or through others."""

    @cache
    def reached(start: str) -> frozenset[str]:
        seen, waiting = set[str](), [start]
        while waiting:
            for other in graph[waiting.pop()] - seen:
                seen.add(other)
                waiting.append(other)
        return frozenset(seen)

    groups = {frozenset(b for b in reached(a) if a in reached(b)) for a in graph if a in reached(a)}
    return len(groups)


def longest_chain(graph: Mapping[str, set[str]]) -> int:
    """Count the files of the longest chain of imports; there may be no circle."""

    @cache
    def length(name: str) -> int:
        return 1 + max((length(other) for other in graph[name]), default=0)

    return max(map(length, graph))


def packages(
    paths: Mapping[str, Path], graph: Mapping[str, set[str]]
) -> Iterator[dict[str, object]]:
    """Count files, lines and the longest chain of each package."""
    for package in sorted({name.partition(".")[0] for name in paths}):
        own = [name for name in paths if name.partition(".")[0] == package]
        inner = {name: graph[name] & {*own} for name in own}
        yield {
            "kind": "package",
            "package": package.replace("_", "-"),
            "files": len(own),
            "lines": sum(len(paths[name].read_text().splitlines()) for name in own),
            "longest_chain": 0 if circles(inner) else longest_chain(inner),
        }


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--old", metavar="PYTHON", help="of an environment with the code before")
    parser.add_argument("--ci", type=Path, default=ROOT, help="checkout whose CI has run")
    arguments = parser.parse_args()
    paths = modules()
    graph = imports(paths)
    rows = list(packages(paths, graph))
    lines = {str(row["package"]): int(str(row["lines"])) for row in rows}
    found = circles(graph)
    summary = {
        "serve_lines": lines["kv-serve"],
        "largest_share": max(lines.values()) / sum(lines.values()),
        "import_circles": found,
    }
    if not found:
        summary["longest_chain"] = longest_chain(graph)
    noted = arguments.ci / ".nox" / ".cache" / "ci_seconds"
    if noted.exists():
        summary["ci_minutes"] = float(noted.read_text()) / 60
    if arguments.old is not None:
        decode = list(timed(arguments.old, *((3, 256) if arguments.quick else (40, TOKENS))))
        summary["decode_new_over_old"] = median(float(str(row["new_over_old"])) for row in decode)
        rows += decode
    print(json.dumps(summary, indent=2))
    for row in rows:
        print(json.dumps(row))
    _result.write("layout", summary, rows, quick=arguments.quick)


if __name__ == "__main__":
    main()
