"""What LeanKV's memory management costs: its share of a decode step and of a prompt.

Management is what the pages cause and compression would not need without them: planning who gives
and takes pages, handing them out by prefix sums, page tables and lengths. Beside it stand what
placing a token costs (the least scores, Algorithm 1) and what storing it costs (decoding,
encoding, writing). A step is one forward pass of SmolLM2 with one token per sequence.

Pages are written by torch here, whose parts can be told apart; native code does a step in one call.

Caches of decode rows are filled with random vectors and attention of a heavy tail, since a prompt
of 16,000 tokens takes minutes on a processor; the prompt row reads a real one.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from statistics import median
from types import ModuleType
from typing import Any
from unittest.mock import patch

import _result
import torch
from rich.console import Console
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kv_attention import Attended
from kv_eval.evaluate.decode import read
from kv_eval.tasks import default_text
from kv_evict import LeanKV
from kv_paging import PagePool, TokenStore, step, tiers, torch_kernels
from kv_paging.page_reservation import PageReservation
from kv_paging.table import PageTable
from kv_policy import CacheShape
from kv_runtime import PolicyCache
from kv_transformers import CompressedCache
from kv_transformers.models import LoadedModel, load_model

SPEC = "leankv:t_high=0.2"
CONSOLE = Console(stderr=True)
Place = tuple[ModuleType | type, str]

MANAGEMENT: tuple[Place, ...] = (
    (step, "plan_step"),
    (PageReservation, "for_step"),
    (PagePool, "give"),
    (PagePool, "take"),
    (PageTable, "enter_some"),
    (PageTable, "find"),
)
STORING: tuple[Place, ...] = ((tiers.Tiers, "step"),)
PLACING: tuple[Place, ...] = ((tiers.Tiers, "weakest"), (tiers.Tiers, "counts"), (LeanKV, "step"))
WRITING: tuple[Place, ...] = ((torch_kernels, "write"),)
APPENDING: tuple[Place, ...] = ((TokenStore, "append"),)


class Clock:
    """Seconds spent in some functions, those they call included, each counted once."""

    def __init__(self) -> None:
        """Start at nothing."""
        self.seconds: Counter[str] = Counter()
        self._inside: set[str] = set()

    @contextmanager
    def watch(self, name: str, places: Sequence[Place]) -> Iterator[None]:
        """Count what is spent in these functions under this name."""
        with ExitStack() as stack:
            for owner, attribute in places:
                timed = self._timed(name, getattr(owner, attribute))
                stack.enter_context(patch.object(owner, attribute, timed))
            yield

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            if name in self._inside:
                return function(*arguments, **options)
            self._inside.add(name)
            began = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds[name] += time.perf_counter() - began
                self._inside.discard(name)

        return timed


class Operations(TorchDispatchMode):
    """Counts tensor operations, and those that make the host wait."""

    WAITS = frozenset({"_local_scalar_dense", "nonzero", "is_nonzero", "equal"})

    def __init__(self) -> None:
        """Start at nothing."""
        super().__init__()
        self.count = self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one, and do it."""
        name = func._schema.name.partition("::")[2]
        self.count += 1
        self.waits += name in self.WAITS
        return func(*args, **(kwargs or {}))


def filled(cache: PolicyCache, batch: int, tokens: int) -> None:
    """Let a cache take in random tokens and what queries of a prompt would have given them."""
    shape = cache.shape
    torch.manual_seed(0)
    cache.begin(torch.ones(batch, tokens, dtype=torch.bool))
    lead = (batch, shape.kv_heads, tokens)
    seen = torch.arange(tokens - 1, -1, -1, dtype=torch.int32).expand(lead).contiguous()
    for layer in range(shape.layers):
        key = torch.randn(*lead, shape.key_dim).to(shape.dtype)
        value = torch.randn(*lead, shape.value_dim).to(shape.dtype)
        share = torch.randn(lead).mul(2).exp()
        mass = share / share.sum(-1, keepdim=True) * seen
        cache.keep(layer, key, value, Attended(value[:, :, None], (mass,), (seen,)))


def decoded(loaded: LoadedModel, batch: int, tokens: int, steps: int) -> dict[str, object]:
    """Decode over a filled cache, and give medians over the steps."""
    cache = CompressedCache(loaded.model, SPEC, backend="torch")
    filled(cache.runtime, batch, tokens)
    token = torch.full((batch, 1), 500)
    spent: list[Counter[str]] = []
    for _ in range(steps + 2):
        clock = Clock()
        with (
            clock.watch("management", MANAGEMENT),
            clock.watch("stepping", STORING),
            clock.watch("placing", PLACING),
        ):
            began = time.perf_counter()
            read(loaded.model, cache, token)
            clock.seconds["step"] = time.perf_counter() - began
        spent.append(clock.seconds)
    spent = spent[2:]  # the first steps make the pool and the tables grow
    found = {name: median(s[name] for s in spent) for name in ("step", "management", "placing")}
    storing = median(s["stepping"] - s["management"] for s in spent)
    share = median(s["management"] / s["step"] for s in spent)
    return {
        "kind": "decode",
        "batch": batch,
        "tokens": tokens,
        "steps": steps,
        "step_s": found["step"],
        "management_s": found["management"],
        "placing_s": found["placing"],
        "storing_s": storing,
        "management_share": share,
        "placing_share": found["placing"] / found["step"],
        "storing_share": storing / found["step"],
        "ratio": cache.memory().ratio,
    }


def prompted(loaded: LoadedModel, tokens: int, times: int) -> dict[str, object]:
    """Read a prompt, and give medians over several times."""
    ids = loaded.tokenizer.encode(default_text().body[: tokens * 8], add_special_tokens=False)
    prompt = torch.tensor([ids[:tokens]])
    spent = []
    for _ in range(times):
        clock = Clock()
        with clock.watch("appending", APPENDING), clock.watch("writing", WRITING):
            began = time.perf_counter()
            read(loaded.model, CompressedCache(loaded.model, SPEC, backend="torch"), prompt)
            clock.seconds["prompt"] = time.perf_counter() - began
        spent.append(clock.seconds)
    return {
        "kind": "prompt",
        "batch": 1,
        "tokens": tokens,
        "times": times,
        "prompt_s": median(s["prompt"] for s in spent),
        "management_s": median(s["appending"] - s["writing"] for s in spent),
        "storing_s": median(s["writing"] for s in spent),
        "management_share": median((s["appending"] - s["writing"]) / s["prompt"] for s in spent),
    }


def operations(shape: CacheShape, batch: int) -> dict[str, object]:
    """Count the tensor operations with which a step is placed and stored, and its waits."""
    from kv_policy import parse

    cache = PolicyCache(parse(SPEC), shape, backend="torch")
    filled(cache, batch, 200)
    counts = []
    for _ in range(4):
        counts.append(one_step(cache, batch))
    count, waits = counts[-1]
    return {
        "kind": "operations",
        "batch": batch,
        "layers": shape.layers,
        "heads": shape.kv_heads,
        "operations": count,
        "waits": waits,
    }


def one_step(cache: PolicyCache, batch: int) -> tuple[int, int]:
    """Decode one token with random queries; count from the end of the last layer's attention."""
    shape = cache.shape
    cache.begin(torch.ones(batch, 1, dtype=torch.bool))
    ops = Operations()

    def random(*lead: int) -> Tensor:
        return torch.randn(*lead).to(shape.dtype)

    finish = cache._keeper.finish

    def counted(*arguments: Any) -> None:
        with ops:
            finish(*arguments)

    with patch.object(cache._keeper, "finish", counted):
        for layer in range(shape.layers):
            query = random(batch, shape.kv_heads, shape.group, 1, shape.key_dim)
            key = random(batch, shape.kv_heads, 1, shape.key_dim)
            value = random(batch, shape.kv_heads, 1, shape.value_dim)
            cache.attend(layer, query, key, value, 0.125)
    return ops.count, ops.waits


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [(1, 1024), (1, 4096), (1, 16384), (4, 1024), (16, 1024), (64, 1024)]
    steps, times, prompt = 15, 3, 4096
    if arguments.quick:
        sizes, steps, times, prompt = [(1, 200), (2, 200)], 3, 1, 300
    loaded = load_model(progress=CONSOLE.print)
    shape = CompressedCache(loaded.model, SPEC, backend="torch").runtime.shape
    small = CacheShape(4, shape.kv_heads, shape.group, shape.key_dim, shape.value_dim, shape.dtype)
    rows: list[dict[str, object]] = []

    def add(row: dict[str, object]) -> dict[str, object]:
        rows.append(row)
        CONSOLE.print(row)
        return row

    many, few = (add(operations(s, b)) for s, b in ((shape, 64), (small, 1)))
    shares = {}
    for batch, tokens in sizes:
        row = add(decoded(loaded, batch, tokens, steps))
        shares[batch, tokens] = float(str(row["management_share"]))
    prompt_row = add(prompted(loaded, prompt, times))
    summary = {
        "ops_per_step_growth": int(str(many["operations"])) / int(str(few["operations"])),
        "prompt_share_4k": float(str(prompt_row["management_share"])),
    }
    for batch, tokens in shares:
        name = f"decode_share_b{batch}_{tokens // 1024}k"
        summary[name] = shares[batch, tokens]
    for name, value in summary.items():
        print(f"{name:24} {value:.4f}")
    _result.write("leankv_overhead", summary, rows, quick=arguments.quick)


if __name__ == "__main__":
    main()
