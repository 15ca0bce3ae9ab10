"""The layout of the code, and the time of a decode step before and after a change of it.

Rows of kind `package` count the files and lines of a package's sources, and the longest chain of
imports in them; `--before` names a checkout to count too. Rows of kind `decode` time steps of a
batch of 8 sequences of 8,192 tokens over all layers of a cache with the code of this checkout and
that of another environment in turn, started in both orders, as the process started second is
slower; `--old` names the Python of that environment, and without it nothing is timed. With `--isa`
both use one instruction set, as the older code may lack the fastest. Rows of kind `variant` time
steps of this checkout with one implementation in place of two: tiers of one rank group for heads
that are alike, and a recent window in pages; the variant `same` changes nothing and shows the
noise. The minutes of CI are those that the last whole `.ci/run` of this
checkout, or of the one that `--ci` names, recorded.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import geometric_mean, median, quantiles

import _result

ROOT = Path(__file__).resolve().parent.parent
SEQUENCES, TOKENS, LAYERS, STEPS = 8, 8192, 4, 12
WARM = 2  # rounds before those that count
POLICIES = ("k8v4", "kv-compress:rate=4+k8v4")
WINDOWED = ("k4v4:window=128", "k8v4:window=64")  # with a recent window

# One implementation in place of two, applied to the code of this checkout.
VARIANTS = {
    "same": "",
    "rank_groups": """
import kv_paging
from kv_policy import Raw
from kv_runtime.layout import Layout
Layout.tiers = lambda self, pool, sequences: kv_paging.PerHeadRankTiers(
    pool, self.pages, torch.tensor(self.kind), sequences,
    raw=[Raw().bind(each)[0] for each in self.shapes],
)
""",
    "paged_window": """
from kv_runtime.layout import Layout
usual = Layout.raw_window
Layout.raw_window = lambda *arguments: usual(*arguments[:5], True)
""",
}

# The program of a timing process: a policy starts a cache, an empty line runs some steps.
WORKER = """
import sys, time, torch
from kv_policy import CacheShape, parse
try:
    from kv_runtime import PolicyCache as Cache
except ImportError:
    from kv_serve.tiered import TieredCache as Cache
torch.set_num_threads(1)
{change}
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

    def __init__(
        self, python: str, *, tokens: int, change: str = "", isa: str | None = None
    ) -> None:
        """Start it.

        Args:
            python: of its environment.
            tokens: of each sequence.
            change: Python that replaces parts of the code first.
            isa: the instruction set of native code; None: the fastest.
        """
        sizes = {"layers": LAYERS, "sequences": SEQUENCES, "steps": STEPS}
        code = WORKER.format(tokens=tokens, change=change, **sizes)
        pipe = subprocess.PIPE
        env = {**os.environ} | ({} if isa is None else {"KV_CPU_ISA": isa})
        self._process = subprocess.Popen(
            (python, "-c", code), stdin=pipe, stdout=pipe, text=True, env=env
        )

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


def timed(old: str, rounds: int, tokens: int, isa: str | None) -> Iterator[dict[str, object]]:
    """Time steps of the code before and of this checkout, with one instruction set."""
    before = partial(Worker, old, tokens=tokens, isa=isa)
    after = partial(Worker, sys.executable, tokens=tokens, isa=isa)
    for policy in POLICIES:
        row = in_turn(before, after, policy, rounds)
        yield {
            "kind": "decode",
            "policy": policy,
            "sequences": SEQUENCES,
            "tokens": tokens,
            "layers": LAYERS,
            "instructions": isa,
            "new_ms": row["ms"],
            "old_ms": row["base_ms"],
            "new_over_old": row["ratio"],
            "quartiles": row["quartiles"],
            "orders": row["orders"],
        }


def variants(rounds: int, tokens: int) -> Iterator[dict[str, object]]:
    """Time steps of this checkout with one implementation in place of two."""
    base = partial(Worker, sys.executable, tokens=tokens)
    for name, change in VARIANTS.items():
        for policy in WINDOWED if name == "paged_window" else (*POLICIES, *WINDOWED):
            row = in_turn(base, partial(base, change=change), policy, rounds)
            yield {"kind": "variant", "variant": name, **row}


def in_turn(
    base: Callable[[], Worker], other: Callable[[], Worker], policy: str, rounds: int
) -> dict[str, object]:
    """Time steps of two processes in turn, started in both orders.

    The process started second is slower whatever its code, which the geometric mean of the ratios
    of both orders cancels.

    Args:
        base: starts the process that the ratio divides by.
        other: starts the other one.
        policy: of their caches.
        rounds: timings of each process in each order, at least 2.

    Returns:
        `ms` and `base_ms`: the median step of each, in ms; `ratio`: other over base;
        `quartiles` of the ratio, over rounds; `orders`: the ratio with the base started first, and
        with the other started first.
    """
    first = _rounds((base, other), policy, rounds)
    second = _rounds((other, base), policy, rounds)[::-1]
    orders = [median(late) / median(early) for early, late in (first, second)]
    pairs = (
        [new / old for old, new in zip(*each, strict=True)] for each in (first, second)
    )  # of each order, by round
    low, _, high = quantiles(map(geometric_mean, zip(*pairs, strict=True)), n=4)
    base_ms, ms = (1000 * median(one + two) for one, two in zip(first, second, strict=True))
    return {
        "policy": policy,
        "ms": ms,
        "base_ms": base_ms,
        "ratio": geometric_mean(orders),
        "quartiles": [low, high],
        "orders": orders,
    }


def _rounds(starts: Sequence[Callable[[], Worker]], policy: str, rounds: int) -> list[list[float]]:
    """Start processes in this order, and return the seconds of a step of each, by round."""
    workers: list[Worker] = []
    try:
        for start in starts:
            workers.append(start())
        for worker in workers:
            worker.ask(policy)
        seconds: list[list[float]] = [[] for _ in workers]
        for i in range(WARM + rounds):
            turn = [*zip(workers, seconds, strict=True)]
            for worker, found in turn if i % 2 else turn[::-1]:
                taken = worker.ask()
                if i >= WARM:
                    found.append(taken)
        return seconds
    finally:
        for worker in workers:
            worker.end()


def modules(root: Path) -> dict[str, Path]:
    """Find all source files of a checkout, by module."""
    found = {}
    for path in sorted(root.glob("packages/*/src/**/*.py")):
        parts = path.relative_to(root).with_suffix("").parts[3:]
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


def circles(graph: Mapping[str, set[str]]) -> list[frozenset[str]]:
    """Find the groups of files that import each other, directly or through others."""

    @cache
    def reached(start: str) -> frozenset[str]:
        seen, waiting = set[str](), [start]
        while waiting:
            for other in graph[waiting.pop()] - seen:
                seen.add(other)
                waiting.append(other)
        return frozenset(seen)

    looped = (a for a in graph if a in reached(a))
    return [*{frozenset(b for b in reached(a) if a in reached(b)) for a in looped}]


def longest_chain(graph: Mapping[str, set[str]]) -> int:
    """Count the files of the longest chain of imports, with all files of a circle in it."""
    group = {name: frozenset({name}) for name in graph}
    group |= {name: each for each in circles(graph) for name in each}

    @cache
    def length(each: frozenset[str]) -> int:
        further = {group[other] for name in each for other in graph[name]} - {each}
        return len(each) + max(map(length, further), default=0)

    return max(map(length, group.values()))


def packages(
    paths: Mapping[str, Path], graph: Mapping[str, set[str]], checkout: str = "after"
) -> Iterator[dict[str, object]]:
    """Count files, lines and the longest chain of each package of a checkout."""
    for package in sorted({name.partition(".")[0] for name in paths}):
        own = [name for name in paths if name.partition(".")[0] == package]
        inner = {name: graph[name] & {*own} for name in own}
        yield {
            "kind": "package",
            "checkout": checkout,
            "package": package.replace("_", "-"),
            "files": len(own),
            "lines": sum(len(paths[name].read_text().splitlines()) for name in own),
            "longest_chain": longest_chain(inner),
        }
    yield {
        "kind": "all packages",
        "checkout": checkout,
        "files": len(paths),
        "lines": sum(len(path.read_text().splitlines()) for path in paths.values()),
        "longest_chain": longest_chain(graph),
        "import_circles": len(circles(graph)),
    }


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--old", metavar="PYTHON", help="of an environment with the code before")
    parser.add_argument("--isa", help="instruction set of native code, old and new")
    parser.add_argument("--before", type=Path, help="checkout of the code before, to count")
    parser.add_argument("--ci", type=Path, default=ROOT, help="checkout whose CI has run")
    arguments = parser.parse_args()
    paths = modules(ROOT)
    graph = imports(paths)
    rows = list(packages(paths, graph))
    lines = {str(row["package"]): int(str(row["lines"])) for row in rows if "package" in row}
    summary = {
        "serve_lines": lines["kv-serve"],
        "largest_share": max(lines.values()) / sum(lines.values()),
        "import_circles": len(circles(graph)),
        "longest_chain": longest_chain(graph),
    }
    noted = arguments.ci / ".nox" / ".cache" / "ci_seconds"
    if noted.exists():
        summary["ci_minutes"] = float(noted.read_text()) / 60
    if arguments.before is not None:
        before = modules(arguments.before)
        rows += packages(before, imports(before), "before")
    size = (3, 256) if arguments.quick else (15, TOKENS)
    if arguments.old is not None:
        decode = list(timed(arguments.old, *size, arguments.isa))
        summary["decode_new_over_old"] = median(float(str(row["new_over_old"])) for row in decode)
        rows += [*decode, *variants(*size)]
    print(json.dumps(summary, indent=2))
    for row in rows:
        print(json.dumps(row))
    _result.write("layout", summary, rows, quick=arguments.quick)


if __name__ == "__main__":
    main()
