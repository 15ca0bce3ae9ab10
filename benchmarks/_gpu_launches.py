"""Launches and host reads of decode steps over pages, counted in Triton's interpreter.

`gpu_static` runs it in a process of its own. Every tensor counts as one on the device.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from kv_paging import PagePool
from kv_policy import CacheShape, parse
from kv_runtime import RequestBatch, RequestRows, RequestStep
from kv_runtime.cache import PolicyCache

READS: Final = re.compile("tolist|item|__(bool|int|index|float)__|numpy|cpu")
# Operations that launch nothing: views, and memory without contents.
VIEWS: Final = (
    "view _unsafe_view expand slice select transpose permute unsqueeze squeeze t detach as_strided "
    "alias unbind split split_with_sizes unfold reshape _reshape_alias"
)
MEMORY: Final = "empty empty_like new_empty empty_strided new_empty_strided"
FREE: Final = frozenset(re.findall(r"\w+", f"{VIEWS} {MEMORY}"))
SEQUENCES: Final = 2
HEADS: Final = 2
QUERIES: Final = 8
DIM: Final = 32
PROMPT: Final = 96
STEPS: Final = 3  # the last of which is counted


class Operations(TorchDispatchMode):
    """Counts operations of torch that launch a kernel."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name not in FREE:
            self.found[f"torch.{name}"] += 1
        return func(*args, **(kwargs or {}))


class Reads(TorchFunctionMode):
    """Counts reads of a tensor's numbers by the host."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if READS.fullmatch(getattr(func, "__name__", "")):
            self.found["reads"] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count what the host does, but not what the interpreter does in its place."""
    found: Counter[str] = Counter()
    modes = [Reads(found), Operations(found)]
    run = GridExecutor.__call__

    def launch(self: GridExecutor, *given: Any, **named: Any) -> Any:
        found[f"triton.{self.fn.__name__}"] += 1
        for mode in reversed(modes):
            mode.__exit__(None, None, None)
        try:
            return run(self, *given, **named)
        finally:
            for mode in modes:
                mode.__enter__()

    with patch.object(GridExecutor, "__call__", launch), modes[0], modes[1]:
        yield found


def drawn(layers: int, *size: int) -> list[list[torch.Tensor]]:
    """Draw queries, keys and values of all layers; before heads and dimensions comes `size`."""
    shapes = ((*size, QUERIES, DIM), (*size, HEADS, DIM), (*size, HEADS, DIM))
    return [[torch.randn(shape) for shape in shapes] for _ in range(layers)]


def cache_of(policy: str, layers: int) -> PolicyCache:
    """Create a cache over a shared pool, as an engine's."""
    shape = CacheShape(layers, HEADS, QUERIES // HEADS, DIM, DIM, torch.float32)
    held = parse(policy)
    nbytes = PolicyCache(held, shape, backend="triton").layout.page_bytes
    pool = PagePool.over(torch.zeros(4000, nbytes, dtype=torch.uint8), kernels="triton")
    return PolicyCache(held, shape, backend="triton", pool=pool)


def alone(policy: str, layers: int) -> Counter[str]:
    """Count a decode step of a batch, as in transformers."""
    cache = cache_of(policy, layers)

    def run(vectors: list[list[torch.Tensor]], valid: torch.Tensor, *, prompt: bool) -> None:
        cache.begin(valid, prompt=prompt)
        for layer, (query, key, value) in enumerate(vectors):
            grouped = query.unflatten(2, (HEADS, -1)).permute(0, 2, 3, 1, 4)
            cache.attend(layer, grouped, key.transpose(1, 2), value.transpose(1, 2), 0.2)

    for count in (PROMPT, *[1] * STEPS):
        vectors, valid = drawn(layers, SEQUENCES, count), torch.ones(SEQUENCES, count).bool()
        if count > 1:
            run(vectors, valid, prompt=True)
            continue
        with counted() as found:
            run(vectors, valid, prompt=False)
    return found


def engine(policy: str, layers: int) -> Counter[str]:
    """Count a decode step of requests, as in vLLM."""
    batch = RequestBatch(cache_of(policy, layers), 0.2, _fail)

    def run(vectors: list[list[torch.Tensor]], rows: RequestRows) -> None:
        for layer, given in enumerate(vectors):
            batch.attend(layer, rows, *given, torch.empty_like(given[0]))
        batch.end()

    for at in range(STEPS + 1):
        count, done = (PROMPT, 0) if at == 0 else (1, PROMPT + at - 1)
        each = [RequestStep(str(i), done, count, PROMPT, serial=i) for i in range(SEQUENCES)]
        batch.begin(dict(enumerate(each)), ())
        rows = RequestRows(tuple(range(SEQUENCES)), tuple(count * i for i in range(SEQUENCES + 1)))
        vectors = drawn(layers, count * SEQUENCES)
        if at == 0:
            run(vectors, rows)
            continue
        with counted() as found:
            run(vectors, rows)
    return found


def _fail(request: str, error: Exception) -> None:
    raise RuntimeError(request) from error


def main() -> None:
    """Count steps of two and of four layers, which tells what a layer adds."""
    policies = json.loads(sys.argv[1])
    torch.manual_seed(0)
    hosts = {"transformers": alone, "vllm": engine}
    found = [
        {"host": host, "policy": policy, "layers": layers, "found": count(policy, layers)}
        for host, count in hosts.items()
        for policy in policies
        for layers in (2, 4)
    ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
