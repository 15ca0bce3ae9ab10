# environment: vllm
"""What the foundation promises, on SmolLM2: bytes held, needles found, nats lost, tokens in vLLM.

Rows of kind `needle` and `nll` are those of `kv-serve eval`. Rows of kind `bytes` are a cache's own
accounting after one prompt; rows of kind `process` are what the operating system says of a process
that holds one; rows of kind `vllm` are the engine's own "KV cache size".
"""

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import _result
import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kv_eval.evaluate.decode import read
from kv_eval.evaluate.journal import open_journal
from kv_eval.evaluate.plan import Plan
from kv_eval.evaluate.report import rows as report_rows
from kv_eval.evaluate.runner import run
from kv_eval.evaluate.specs import read_specs
from kv_eval.tasks import default_text
from kv_transformers import CompressedCache
from kv_transformers.from_text import held, make_cache
from kv_transformers.models import LoadedModel, load_model

UNIFORM = ("k8v8", "k8v4", "k4v8", "k4v4", "k4v2", "k2v4", "k8v2")
HALF = ("snapkv:budget=1000,pool=5+k8v4", "snapkv:budget=1000+k8v4")
VLLM = ("k8v8", "k8v4", "k4v2")
KV_BYTES = 256 << 20
CONSOLE = Console(stderr=True)


@dataclass(frozen=True)
class Size:
    """How much is run."""

    plans: tuple[Plan, ...]
    prompt: int  # tokens of the prompt whose bytes are counted
    long_prompt: int
    budget: int
    batch: int  # sequences of the prompt that a process holds
    held: tuple[str, ...]  # caches that processes hold
    vllm: bool


def full_size() -> Size:
    """What the committed figures come from."""
    compared = ("k8v8", "k8v4", "k4v2", *HALF)
    return Size(
        plans=(
            Plan(read_specs(compared), ("needle",), ("aware",), length=2000, samples=10),
            Plan(read_specs(("k8v4",)), ("needle",), ("agnostic",), length=2000, samples=10),
            Plan(read_specs(UNIFORM), ("nll",), ("agnostic",), length=1024, samples=6, batch=6),
        ),
        prompt=2000,
        long_prompt=4000,
        budget=1024,
        batch=4,
        held=("full", "raw", "k8v4"),
        vllm=True,
    )


def quick_size() -> Size:
    """A smoke run: the same steps on very little."""
    return Size(
        plans=(
            Plan(read_specs(("k8v4",)), ("needle",), ("aware",), length=300, samples=1),
            Plan(
                read_specs(("k8v4",)),
                ("nll",),
                ("agnostic",),
                length=64,
                samples=1,
                batch=1,
                continuation=4,
            ),
        ),
        prompt=200,
        long_prompt=400,
        budget=64,
        batch=1,
        held=("full", "k8v4"),
        vllm=False,
    )


def evaluated(loaded: LoadedModel, plans: Sequence[Plan]) -> Iterator[dict[str, object]]:
    """Run the plans; what was finished before an interruption is not run again."""
    text = default_text()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    for number, plan in enumerate(plans):
        path = _result.RESULTS / f"foundation.{number}.partial"
        settings = plan.identity(loaded, text) | {"commit": _result.commit()}
        journal, sentence = open_journal(path, settings)
        if sentence:
            CONSOLE.print(sentence)
        total = len(plan.pairs) * len(plan.policies) * plan.samples
        with Progress(*columns, console=CONSOLE) as progress:
            bar = progress.add_task("samples", total=total)
            for entry in run(loaded, plan, text, journal):
                progress.update(bar, advance=1, description=f"{entry.task}: {entry.policy}")
        found = report_rows(plan, journal)
        journal.remove()
        yield from ({"kind": row.task, **msgspec.to_builtins(row)} for row in found)


def prompt_of(loaded: LoadedModel, tokens: int, batch: int = 1) -> torch.Tensor:
    """Some text of so many tokens."""
    ids = loaded.tokenizer.encode(default_text().body[: tokens * 8], add_special_tokens=False)
    return torch.tensor([ids[:tokens]]).expand(batch, tokens)


def counted(loaded: LoadedModel, spec: str, tokens: int) -> dict[str, object]:
    """A cache's own accounting after one prompt."""
    cache = make_cache(loaded.model, spec)
    assert isinstance(cache, CompressedCache)
    read(loaded.model, cache, prompt_of(loaded, tokens))
    report = cache.memory()
    names = ("vector", "score", "position", "unfilled", "spare", "window", "table", "total", "full")
    parts = {f"{name}_bytes": getattr(report, f"{name}_bytes") for name in names}
    kept = {"most": int(report.tokens.max()), "least": int(report.tokens.min())}
    return {
        "kind": "bytes",
        "policy": spec,
        "length": tokens,
        "ratio": report.ratio,
        "tokens_per_head": kept,
        **parts,
    }


def resident() -> int:
    """Bytes of this process in memory, once what is free has gone back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmRSS")


def hold(spec: str, tokens: int, batch: int) -> None:
    """Print what this process grows by when it holds a cache, and what it loses without it."""
    loaded = load_model()
    prompt = prompt_of(loaded, tokens, batch)
    read(loaded.model, make_cache(loaded.model, spec), prompt[:1, :64])  # what is made only once
    before = resident()
    cache = make_cache(loaded.model, spec)
    for start in range(0, tokens, 250):  # small parts, so that little else is in memory
        read(loaded.model, cache, prompt[:, start : start + 250])
    size, during = held(cache), resident()
    del cache
    print(
        json.dumps(
            {
                **msgspec.to_builtins(size),
                "grown": during - before,
                "given_back": during - resident(),
            }
        )
    )


def processes(specs: Sequence[str], tokens: int, batch: int) -> Iterator[dict[str, object]]:
    """Hold caches, each in a process of its own."""
    for spec in specs:
        CONSOLE.print(f"process: {spec}")
        command = (sys.executable, __file__, "--hold", spec, str(tokens), str(batch))
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        answer = json.loads(done.stdout.splitlines()[-1])
        yield {"kind": "process", "policy": spec, "length": tokens, "batch": batch, **answer}


def engines(folder: str) -> Iterator[dict[str, object]]:
    """Ask vLLM how many tokens it can hold."""
    from kv_eval.vllm.capacity import token_capacity

    for policy in (None, *VLLM):
        CONSOLE.print(f"vllm: {policy or 'stock'}")
        tokens = token_capacity(folder, policy, KV_BYTES, max_model_len=4096)
        yield {"kind": "vllm", "policy": policy or "stock", "kv_bytes": KV_BYTES, "tokens": tokens}


def summarize(rows: Sequence[dict[str, object]], size: Size) -> dict[str, float]:
    """The figures that a document may quote."""

    def find(kind: str, policy: str, name: str, **also: object) -> float:
        wanted = {"kind": kind, "policy": policy, **also}
        (row,) = (r for r in rows if all(r.get(k) == v for k, v in wanted.items()))
        value = row[name]
        assert isinstance(value, int | float)
        return float(value)

    figures = {
        "needle_full": find("needle", "full", "score", setting="aware"),
        "needle_k8v4": find("needle", "k8v4", "score", setting="aware"),
        "bytes_k8v4": find("bytes", "k8v4", "ratio"),
        f"bytes_snapkv_{size.budget}": find("bytes", f"snapkv:budget={size.budget}", "ratio"),
    }
    for row in (r for r in rows if r["kind"] == "nll"):
        figures[f"nats_{row['policy']}"] = float(str(row["score"]))
    base = find("process", "full", "grown")
    for policy in (p for p in size.held if p != "full"):
        figures[f"process_{policy}"] = find("process", policy, "grown") / base
    if size.vllm:
        stock = find("vllm", "stock", "tokens")
        for policy in VLLM:
            figures[f"vllm_tokens_{policy}"] = find("vllm", policy, "tokens") / stock
    return figures


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    parser.add_argument("--hold", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hold:
        spec, tokens, batch = arguments.hold
        hold(spec, int(tokens), int(batch))
        return
    size = quick_size() if arguments.quick else full_size()
    loaded = load_model(progress=CONSOLE.print)
    snapkv = f"snapkv:budget={size.budget}"
    rows: list[dict[str, object]] = [
        counted(loaded, "k8v4", size.prompt),
        counted(loaded, snapkv, size.long_prompt),
        counted(loaded, f"{snapkv}+k8v4", size.long_prompt),
    ]
    rows += processes(size.held, size.prompt, size.batch)
    if size.vllm:
        rows += engines(str(loaded.folder))
    rows += evaluated(loaded, size.plans)
    summary = summarize(rows, size)
    for name, value in summary.items():
        print(f"{name:24} {value:.4f}")
    _result.write("foundation", summary, rows, quick=arguments.quick)


if __name__ == "__main__":
    main()
