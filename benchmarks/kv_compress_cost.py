"""What KV-Compress's pass costs: time beside the prefill it follows, and memory beside the cache.

The pass after a prompt is what compression adds to reading it: the second look at the attention of
the last queries, the metrics, and the schedule of pages. `stored` is a pass over tokens that lie in
pages already, as while generating: metrics are there, pages are scheduled and freed, and kept
vectors move into the holes. Both sides of a ratio run in this process, turn by turn.

Temporary memory is the most that the allocator holds at a time during a pass over stored tokens,
above what it held before, beside the bytes of vectors that the pass is over.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from statistics import median
from types import ModuleType
from unittest.mock import patch

import _result
import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from kv_attention import torch_backend
from kv_eval.evaluate.decode import read
from kv_eval.tasks import default_text, nll
from kv_policy import complete, parse
from kv_runtime.retain import scoring
from kv_runtime.retain import selected as keep_selected
from kv_transformers import CompressedCache
from kv_transformers.models import LoadedModel, load_model

BUDGET = 512
SPECS = (
    f"kv-compress:budget={BUDGET}",
    f"kv-compress:budget={BUDGET},window=32",
    f"kv-compress:budget={BUDGET},window=full",
)
CONSOLE = Console(stderr=True)
PARTS: tuple[tuple[ModuleType, str], ...] = (
    (torch_backend, "observe_part"),
    (scoring, "score_layers"),
    (keep_selected, "plan_layers"),
)


@contextmanager
def clocked(spent: Counter[str]) -> Iterator[None]:
    """Add up the seconds of each part of the pass."""

    def timed(name: str, work: Callable[..., object]) -> Callable[..., object]:
        @wraps(work)
        def run(*args: object, **options: object) -> object:
            began = time.perf_counter()
            try:
                return work(*args, **options)
            finally:
                spent[name] += time.perf_counter() - began

        return run

    with ExitStack() as stack:
        for module, name in PARTS:
            stack.enter_context(patch.object(module, name, timed(name, getattr(module, name))))
        yield


def prompt_row(
    loaded: LoadedModel, spec: str, prompt: torch.Tensor, rounds: int
) -> dict[str, object]:
    """Read a prompt under a policy and without one, turn by turn."""
    whole, raw, parts = [], [], []
    for _ in range(rounds):
        spent: Counter[str] = Counter()
        cache = CompressedCache(loaded.model, spec, backend="torch")
        began = time.perf_counter()
        with clocked(spent):
            read(loaded.model, cache, prompt)
        whole.append(time.perf_counter() - began)
        parts.append(spent)
        cache = CompressedCache(loaded.model, "raw", backend="torch")
        began = time.perf_counter()
        read(loaded.model, cache, prompt)
        raw.append(time.perf_counter() - began)
    names = sorted(parts[0])
    each = {name: median(p[name] / w for p, w in zip(parts, whole, strict=True)) for name in names}
    return {
        "kind": "prompt",
        "policy": str(parse(spec)),
        "tokens": prompt.shape[1],
        "rounds": rounds,
        "share": median(sum(p.values()) / w for p, w in zip(parts, whole, strict=True)),
        "prefill_over_raw": median(a / b for a, b in zip(whole, raw, strict=True)),
        "prefill_seconds": median(raw),
        **{f"{name}_share": value for name, value in each.items()},
    }


def waiting(loaded: LoadedModel, prompt: torch.Tensor) -> CompressedCache:
    """A cache that stored a prompt whole and is about to be compressed to the budget."""
    spec = f"kv-compress:budget={prompt.shape[1]},every=1"
    cache = CompressedCache(loaded.model, spec, backend="torch")
    read(loaded.model, cache, prompt)
    keeper = cache.runtime._keeper
    assert isinstance(keeper, keep_selected.KeepSelected)
    selector = parse(f"kv-compress:budget={BUDGET},every=1").selector
    assert selector is not None
    keeper.selector = complete(selector)
    keeper._turns.prompt(len(prompt))
    return cache


def stored_row(
    loaded: LoadedModel, prompt: torch.Tensor, rounds: int, prefill: float
) -> dict[str, object]:
    """Compress stored tokens: the seconds, and the most memory held on the way."""
    seconds = []
    for _ in range(rounds):
        cache = waiting(loaded, prompt)
        before = cache.memory()
        began = time.perf_counter()
        cache.runtime._keeper._again(cache.runtime.batch, [*range(len(prompt))])
        seconds.append(time.perf_counter() - began)
    cache = waiting(loaded, prompt)
    peak = most_held(
        lambda: cache.runtime._keeper._again(cache.runtime.batch, [*range(len(prompt))])
    )
    after = cache.memory()
    return {
        "kind": "stored",
        "tokens": prompt.shape[1],
        "budget": BUDGET,
        "rounds": rounds,
        "seconds": median(seconds),
        "over_prefill": median(seconds) / prefill,
        "temporary_bytes": peak,
        "cache_bytes": before.vector_bytes,
        "pages_before": before.pages_used,
        "pages_after": after.pages_used,
    }


def most_held(work: Callable[[], object]) -> int:
    """The most bytes that the allocator holds during the work, above what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = most = 0
    for _, change in changes:
        held += change
        most = max(most, held)
    return most


def summarize(rows: Sequence[dict[str, object]]) -> dict[str, float]:
    """The figures that a document may quote."""
    first = next(row for row in rows if row["kind"] == "prompt")
    stored = next(row for row in rows if row["kind"] == "stored")
    return {
        "pass_over_prefill_4k": float(str(first["share"])),
        "stored_pass_over_prefill_4k": float(str(stored["over_prefill"])),
        "temporary_bytes_over_cache": float(str(stored["temporary_bytes"]))
        / float(str(stored["cache_bytes"])),
    }


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    quick = parser.parse_args().quick
    length, rounds = (600, 1) if quick else (4096, 3)
    torch.set_num_threads(1)
    loaded = load_model(progress=CONSOLE.print)
    text = nll(loaded.tokenizer, default_text(), length=length, samples=1, seed=0)
    prompt = torch.tensor([text[0].prompt_ids])
    rows = [prompt_row(loaded, spec, prompt, rounds) for spec in SPECS]
    rows.append(stored_row(loaded, prompt, rounds, float(str(rows[0]["prefill_seconds"]))))
    summary = summarize(rows)
    for row in rows:
        CONSOLE.print(row)
    for name, value in summary.items():
        print(f"{name:28} {value:.4f}")
    _result.write("kv_compress_cost", summary, rows, quick=quick)


if __name__ == "__main__":
    main()
